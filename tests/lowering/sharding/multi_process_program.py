"""One of two processes that run one program: `python multi_process_program.py NUMBER PORT FILE EXPORTED...`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.pjit import pjit
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

number = int(sys.argv[1])
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=number)

import hostcallback as hcb  # noqa: E402, as a program would that initializes first
from hostcallback.receiver.sinks.scalars import ScalarsSink  # noqa: E402

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))
found: list[Any] = []


def keep(part: Any, *, device: Any, index: Any, program: str) -> None:
    place = None if index is None else [[s.start, s.stop] for s in index[0]]
    found.append((program, jax.local_devices().index(device), place, part.tolist()))


def automatic(x: Any) -> Any:
    return lax.scan(lambda c, _: (hcb.id_tap(keep, c + 1, program="automatic"), None), x, None, length=3)[0]


def manual(x: Any) -> Any:
    def each(x: Any) -> Any:
        return hcb.id_tap(keep, x, program="manual")

    return jax.shard_map(each, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))(x)


whole = np.arange(16.0, dtype=np.float32).reshape(4, 4)
x = jax.make_array_from_callback((4, 4), NamedSharding(mesh, P("i", "j")), lambda place: whole[place])
for jit in (jax.jit, hcb.jit):
    for program in (automatic, manual):
        jit(program)(x).block_until_ready()
hcb.barrier_wait()


# One value, one line. What each process prints by itself, and what `jax.debug.print` prints:

local_mesh = Mesh(np.array(jax.local_devices()), ("d",))
loss = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda place: np.float32(3))
rows = jax.make_array_from_callback((4, 4), NamedSharding(mesh, P("i")), lambda place: whole[place])


def in_shard_map(say: Any) -> Any:
    def each(x: Any) -> Any:
        say("shard_map {}", x)
        return x

    return jax.shard_map(each, mesh=mesh, in_specs=P(), out_specs=P())


def everywhere(say: Any) -> None:
    """Prints replicated values in every kind of program."""

    def tapped(text: str) -> Any:
        return jax.jit(lambda x: (say(text + " {}", x), x)[1])

    tapped("replicated")(loss)
    jax.jit(in_shard_map(say))(loss)
    tapped("own program")(np.float32(number))
    tapped("own mesh")(jax.device_put(np.float32(number), NamedSharding(local_mesh, P())))
    say("eager {}", number)


def lines_of(run: Any, *args: Any) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(*args)
        jax.effects_barrier()
        hcb.barrier_wait()
    return sorted(out.getvalue().splitlines())


written: list[Any] = []


class Writer:
    def write(self, record: Any) -> None:
        written.append([record.step, record.scalars])


def scalars(x: Any) -> Any:
    hcb.id_tap(lambda x: None, x, name="loss")
    return hcb.id_tap(lambda x: None, x, name="everywhere", processes="all")


with hcb.outfeed_receiver(sinks=[ScalarsSink(Writer())], record=sys.argv[3] + ".taps"):
    jax.jit(scalars)(loss)
printed = {
    "jax": lines_of(everywhere, jax.debug.print),
    "hcb": lines_of(everywhere, hcb.print),
    "all": lines_of(everywhere, hcb.print(processes="all")),
    "first": lines_of(everywhere, hcb.print(processes="first")),
    "per device": lines_of(jax.jit(lambda x: hcb.print("{}", x, partitioned=True)), loss),
}
kept: list[Any] = []
jax.jit(lambda x: hcb.id_tap(lambda x, *, index: kept.append([str(index), x.tolist()]), x))(rows)
hcb.barrier_wait()


# Programs without taps in blocks that look into them. Their devices are those of the inputs, the results, within, or of
# the mesh around them:


def constrained() -> Any:
    ones = lax.with_sharding_constraint(jax.numpy.ones(4), NamedSharding(mesh, P("i")))
    return jax.numpy.cos(ones - 1).sum()


def cosine_of_zeros(x: Any = None) -> Any:
    return cosine(jax.numpy.zeros(4) if x is None else x).sum()


def around(axis_type: Any, *args: Any) -> Any:
    with jax.set_mesh(jax.make_mesh((4,), ("k",), axis_types=(axis_type,))):
        return jax.jit(cosine_of_zeros)(*args)


def around_pjit() -> Any:
    with mesh:
        return pjit(cosine_of_zeros)()


cosine = jax.numpy.cos
zeros = np.zeros(4, np.float32)
observed: dict[str, Any] = {}


def observing_cosines(name: str) -> Any:
    means = observed[name] = []

    def keep_means(sites: Any) -> None:
        means.extend(float(mean) for statistics in sites.values() for mean in statistics.values())

    return hcb.observe(where="cos", what="mean", tap_func=keep_means)


for name, run in {
    "inputs": lambda: jax.jit(lambda x: cosine(x - x).sum())(rows),
    "results": lambda: jax.jit(
        lambda: cosine(jax.numpy.zeros(4)), out_shardings=NamedSharding(mesh, P("i"))
    )(),
    "within": lambda: jax.jit(constrained)(),
    "explicit mesh": lambda: around(AxisType.Explicit, zeros),
    "explicit mesh, no inputs": lambda: around(AxisType.Explicit),
    "auto mesh": lambda: around(AxisType.Auto, zeros),
    "auto mesh, no inputs": lambda: around(AxisType.Auto),
    "mesh of pjit": around_pjit,
}.items():
    with observing_cosines(name):
        run()
        hcb.barrier_wait()
missing = jax.make_array_from_callback(
    (4, 4), NamedSharding(mesh, P("i")), lambda place: whole[place] * np.nan
)
with hcb.error_collector(on_error="warn") as errors, hcb.watch_nonfinite():
    jax.jit(lambda x: x.sum())(missing)
observed["failed"] = [check.name for check in errors.failed_checks]


# Programs whose mesh is gone where they are lowered:

logged: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("hostcallback").addHandler(handler)
totals: list[float] = []
with observing_cosines("mesh that is gone"):
    for more in (zeros, np.zeros(8, np.float32)):
        with jax.set_mesh(jax.make_mesh((4,), ("k",), axis_types=(AxisType.Auto,))):
            traced = jax.jit(cosine_of_zeros).trace(more)
        totals.append(float(traced.lower().compile()(more)))
    hcb.barrier_wait()
logging.getLogger("hostcallback").removeHandler(handler)
observed["gone"] = {"logged": logged, "totals": totals}


# Programs that one process of four devices has exported:

from_exported: dict[str, Any] = {}
for path in sys.argv[4:]:
    program = jax.export.deserialize(bytearray(Path(path).read_bytes()))
    parts = from_exported[Path(path).stem] = []
    hcb.bind("exported", lambda x, *, index, parts=parts: parts.append([str(index), x.tolist()]))
    jax.block_until_ready(program.call(rows if "rows" in path else loss))
    hcb.barrier_wait()
with open(sys.argv[3], "w") as file:  # standard output is shared with JAX's own messages
    json.dump(
        {
            "found": found,
            "printed": printed,
            "written": written,
            "kept": kept,
            "exported": from_exported,
            "observed": observed,
        },
        file,
    )
