"""Programs beyond one process: `kept_program.py cache FOLDER VALUE | write FOLDER | run FOLDER | several NUMBER PORT`.

With `several` it is one of two processes of a program.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb

WHAT, FOLDER, *REST = sys.argv[1:]
events: Counter[str] = Counter()


def program(x: Any) -> Any:
    """Reads a knob in each of four iterations."""
    return jax.lax.scan(lambda c, _: (c + hcb.knob("lr", 0.5), None), x, None, length=4)[0]


def arguments() -> list[Any]:
    """One on one device, one that is divided among all of them."""
    mesh = Mesh(jax.devices(), ("i",))
    return [jnp.zeros(4), jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec("i")))]


def cache() -> None:
    """Compiles with a persistent cache, with a knob of another value."""
    jax.monitoring.register_event_listener(
        lambda event, **_: events.update([event.rpartition("/")[2]] if "compilation_cache" in event else [])
    )
    jax.config.update("jax_compilation_cache_dir", FOLDER)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    x, divided = arguments()
    hcb.knob("lr", 0.5)
    hcb.knobs["lr"] = float(REST[0])
    f = jax.jit(program)
    for argument in (x, divided):
        events.clear()
        print(f(argument)[0], "hit" if events["cache_hits"] else "miss")


def run() -> None:
    """Runs the exported programs before and after a knob of their name is set."""
    for i, x in enumerate(arguments()):
        f = jax.export.deserialize((Path(FOLDER) / str(i)).read_bytes())
        print(jax.jit(f.call)(x)[0])
        if i == 0:
            hcb.knob("lr", 0.5)
        hcb.knobs["lr"] = 2 + i
        print(jax.jit(f.call)(x)[0])


def several() -> None:
    """Reads a knob on this process's devices, and tries to on those of both."""
    jax.distributed.initialize(f"localhost:{REST[0]}", num_processes=2, process_id=int(FOLDER))
    print(jax.jit(program)(0.0))
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    x = jax.make_array_from_callback((mesh.size,), sharding, lambda place: np.zeros(1, np.float32))
    try:
        jax.jit(program)(x)
    except NotImplementedError as error:
        print(error)


if WHAT == "cache":
    cache()
elif WHAT == "several":
    several()
elif WHAT == "write":
    for i, x in enumerate(arguments()):
        exported = jax.export.export(jax.jit(program), disabled_checks=hcb.export_checks())(x)
        (Path(FOLDER) / str(i)).write_bytes(exported.serialize())
else:
    run()
