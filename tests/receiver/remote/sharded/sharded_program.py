"""One of several processes of a program whose arrays are sharded over all their devices, two each, and that forwards:
`python sharded_program.py NUMBER COUNT PORT COLLECTOR SPOOL STEPS`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

number, count, port, collector, spool, steps = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(number))

import hostcallback as hcb  # noqa: E402, as a program would that initializes first
from hostcallback import host_callback  # noqa: E402

mesh = Mesh(np.array(jax.devices()).reshape(int(count), 2), ("i", "j"))
whole = np.arange(8.0 * int(count), dtype=np.float32).reshape(2 * int(count), 4)


def put(value: np.ndarray[Any, Any], spec: P, on: Mesh = mesh) -> Any:
    return jax.make_array_from_callback(value.shape, NamedSharding(on, spec), lambda place: value[place])


def nothing(value: Any) -> None:
    """Consumes nothing here."""


def last(value: Any, transforms: Any) -> None:
    """The same."""


@hcb.jit
def train(x: Any, scale: Any) -> Any:
    def body(carry: Any, step: Any) -> tuple[Any, None]:
        carry = carry + 1
        hcb.id_tap(nothing, {"x": carry, "step": step}, name="scan")
        hcb.id_tap(nothing, scale * step, name="replicated")
        hcb.print("sum {} of {}", carry.sum(), carry)
        return carry, None

    x = lax.scan(body, x, jnp.arange(int(steps)))[0]
    jax.vmap(lambda row: hcb.id_tap(nothing, row, name="batched"))(x)
    return host_callback.id_tap(last, x * 2, device_index=2)


@jax.jit
def plain(x: Any) -> Any:
    hcb.id_tap(nothing, x, name="local", sharding="local")
    return hcb.id_tap(nothing, -x, name="plain")


@hcb.jit
def partly(x: Any) -> Any:
    def each(x: Any) -> Any:
        return hcb.id_tap(nothing, x, name="partly")

    return jax.shard_map(each, mesh=mesh, in_specs=P(None, "j"), out_specs=P(None, "j"), axis_names={"j"})(x)


def explicitly(x: Any) -> Any:
    return hcb.id_tap(nothing, x + 5, name="explicit")


with hcb.outfeed_receiver(forward=hcb.Forward(collector, spool=spool, drain_sec=60.0)) as rx:
    for _ in range(2):
        x = put(whole, P("i", "j"))
        x = train(x, put(np.ones(3, np.float32), P()))
        x = plain(x)
        partly(x)
    typed = jax.make_mesh((int(count), 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(typed):
        hcb.jit(explicitly)(put(whole, P("j", "i"), typed))
assert rx.forwarder is not None
assert not rx.forwarder.unsent_bytes
