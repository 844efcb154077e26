"""Exports tapped programs, or runs exported ones: `python exported_program.py write|run|bound FOLDER`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb


class Pair(NamedTuple):
    """A container that both processes can have."""

    first: Any
    second: Any


def record(arg: Any, *, transforms: Any, **kwargs: Any) -> None:
    """Functions of the exporting process only; they must not run in the other process."""
    raise AssertionError("the exporting process's function ran")


def in_a_scan(x: Any) -> Any:
    def step(c: Any, i: Any) -> Any:
        tapped = {"pair": Pair(c * 2, None), "step": (i, "text"), "size": [c.size]}
        hcb.id_tap(record, tapped, name="state", run=7)
        hcb.id_print(c.sum(), what="sum")
        hcb.print("step {i}: {c}", i=i, c=c[0])
        return c + 1, None

    return lax.scan(step, x, jnp.arange(3))[0]


def differentiated(x: Any) -> Any:
    return jax.vmap(jax.grad(lambda v: hcb.id_tap(record, v, name="loss") ** 2))(x)


def each_element(x: Any) -> Any:
    jax.vmap(lambda v: hcb.callback(record, v, name_of="element"))(x)
    return x


PROGRAMS = {"scan": in_a_scan, "grad": differentiated, "each": each_element}


def sharded(x: Any) -> Any:
    return jax.device_put(x, NamedSharding(Mesh(jax.devices(), ("i",)), P("i")))


def arguments() -> dict[str, Any]:
    """The programs' arguments, by the name of the exported file."""
    x = jnp.arange(8.0)
    return {
        **{f"{name}-{how}": x for name in PROGRAMS for how in ("jax", "hcb")},
        **{f"{name}-sharded": sharded(x) for name in PROGRAMS},
    }


def write(folder: Path) -> None:
    """Exports every program, of `jax.jit` and of `hcb.jit`, for one device and for four."""
    for name, x in arguments().items():
        program, _, how = name.partition("-")
        jitted: Any = {"jax": jax.jit, "hcb": hcb.jit, "sharded": jax.jit}[how](PROGRAMS[program])
        exported = jax.export.export(jitted, disabled_checks=hcb.export_checks())(x)
        (folder / name).write_bytes(exported.serialize())


def run(folder: Path, bound: bool) -> None:
    """Runs every exported program, plainly and within `hcb.jit`, and prints its tap messages."""

    def show(arg: Any, *, transforms: Any = (), **kwargs: Any) -> None:
        shown = jax.tree.map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, arg)
        print("tap", shown, transforms, kwargs)

    def show_tap(arg: Any, *, transforms: Any, **kwargs: Any) -> None:
        show(arg, transforms=transforms, **kwargs)

    for name, x in arguments().items():
        exported = jax.export.deserialize(bytearray((folder / name).read_bytes()))
        if bound:
            hcb.bind("state", show_tap, extra=1)
            hcb.bind("loss", show_tap)
            hcb.bind("record", show)
        for how, call in (("plain", exported.call), ("hcb.jit", hcb.jit(exported.call))):
            print("==", name, how, flush=True)
            out = call(x)
            try:
                hcb.barrier_wait()
            except hcb.TapFunctionException as error:
                traceback.print_exception(error, file=sys.stdout)
            print("result", np.asarray(out).tolist())


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[2]), sys.argv[1] == "bound")
