"""One of several processes that add up numbers and forward: `python distributed_program.py NUMBER COUNT PORT COLLECTOR
SPOOL STEPS`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number, count, port, collector, spool, steps = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(number))

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()), ("i",))


@hcb.jit
def train(x: Any) -> Any:
    def each(x: Any) -> Any:
        def body(carry: Any, step: Any) -> tuple[Any, None]:
            total = lax.psum(carry, "i")
            hcb.id_tap(lambda value: None, {"total": total, "step": step}, name="total")
            return carry + 1, None

        return lax.scan(body, x, jnp.arange(int(steps)))[0]

    return jax.shard_map(each, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)


whole = np.arange(float(count), dtype=np.float32)
x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("i")), lambda place: whole[place])
with hcb.outfeed_receiver(forward=hcb.Forward(collector, spool=spool, drain_sec=60.0)) as rx:
    train(x).block_until_ready()
    hcb.print("a whole one: {}", x)
assert rx.forwarder is not None
assert not rx.forwarder.unsent_bytes
