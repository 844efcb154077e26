"""One of several processes that train step by step and forward: `python stepping_program.py NUMBER COUNT PORT COLLECTOR
SPOOL CONFIRMED STEPS SEED`.

It writes to the file CONFIRMED the time of each completed step, on which a test can rely independently of forwarding.
Each step emits three messages, whose steps go on from one step of the loop to the next.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number, count, port, collector, spool, confirmed, steps, seed = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(number))

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()), ("i",))
everywhere = NamedSharding(mesh, P("i"))


@hcb.jit
def train(x: Any, first: Any) -> Any:
    def each(x: Any, first: Any) -> Any:
        def body(carry: Any, step: Any) -> tuple[Any, None]:
            total = lax.psum(carry, "i")
            hcb.id_tap(lambda value: None, {"total": total, "step": step}, name="total")
            return carry + 1, None

        return lax.scan(body, x, first + jnp.arange(3))[0]

    return jax.shard_map(each, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))(x, first)


whole = np.arange(float(count), dtype=np.float32)
x = jax.make_array_from_callback(whole.shape, everywhere, lambda place: whole[place])
file = os.open(confirmed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
chance, pause = random.Random(seed), threading.Event()
with hcb.outfeed_receiver(forward=hcb.Forward(collector, spool=spool, drain_sec=60.0)):
    for step in range(int(steps)):
        x = train(x, np.int32(3 * step)).block_until_ready()
        os.write(file, struct.pack("<qq", step, time.monotonic_ns()))
        pause.wait(chance.choice([0.0, 0.0, 0.002, 0.04]))
