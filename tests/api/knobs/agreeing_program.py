"""One process of two that read one knob and stop one loop: `python agreeing_program.py NUMBER PORT`."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P(("i", "j"))), lambda _: np.zeros(1, np.float32))
NUMBERS = np.arange(6, dtype=np.int16).reshape(2, 3)
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "float": (1.0, 2.0, 6.0),
    "bool": (False, True, False),
    "array": (NUMBERS, NUMBERS + 1, NUMBERS + 5),
}
"""By knob the default, and what the two processes set."""


def shown(result: jax.Array) -> list[float]:
    return [float(shard.data[0]) for shard in result.addressable_shards]


def reading(name: str, default: Any) -> Any:
    def program(x: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return x + jnp.sum(jnp.asarray(hcb.knob(name, default, agree="processes"))).astype(x.dtype), None

        return lax.scan(step, x, None, length=3)[0]

    return program


def per_device(program: Any, axes: set[str], more: tuple[Any, ...] = ()) -> Any:
    specs = P(tuple(name for name in mesh.axis_names if name in axes))
    out_specs = (specs, *more) if more else specs
    return jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=axes)


for name, (default, *values) in VALUES.items():
    program = reading(name, default)
    for how, each in (("auto", program), ("manual", per_device(program, {"i", "j"}))):
        run = jax.jit(each)
        before = shown(run(x))
        hcb.knobs[name] = values[number]
        print(name, how, *before, *shown(run(x)), flush=True)
        hcb.knobs[name] = default

if os.environ.get("HOSTCALLBACK_TRANSPORT") != "callback":  # JAX has no callbacks there
    partly = jax.jit(per_device(reading("partly", 2.0), {"i"}))
    print("partly", *shown(partly(x)), flush=True)
    hcb.knobs["partly"] = 3.0 + number
    print("partly", *shown(partly(x)), flush=True)


def looping(x: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        hcb.tap(lambda i: ask(int(i)), i)
        return x + 1

    return hcb.fori_loop(0, 1_000_000, body, x, progress=False, stop="processes")


asks = 0


def ask(step: int) -> None:
    if step >= 5 and number == asks:
        hcb.request_stop(f"process {asks} asks")


for asks in range(2):
    # Where the compiler partitions, the first process has the message.
    loop = looping if asks == 0 else per_device(looping, {"i", "j"}, (P(),))
    value, count = jax.jit(loop)(x)
    print("stopped", asks, int(count), *shown(value), flush=True)
    hcb.barrier_wait()
    multihost_utils.sync_global_devices("stopped")
    hcb.clear_stop()
