"""One of several processes that train step by step an array that is sharded over them, and forward: `python
sharded_stepping_program.py NUMBER COUNT PORT COLLECTOR SPOOL CONFIRMED STEPS LIFE`.

It writes to the file CONFIRMED the time of each completed step. Each value contains LIFE and the step.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number, count, port, collector, spool, confirmed, steps, life = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=int(count), process_id=int(number))

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()), ("i",))


@hcb.jit
def train(x: Any, step: Any) -> Any:
    x = x + 1
    hcb.id_tap(lambda value: None, {"life": np.int32(int(life)), "step": step, "x": x}, name="x")
    hcb.id_tap(lambda value: None, {"mean": x.mean(), "step": step}, name="mean")
    return x


whole = np.arange(4.0 * int(count), dtype=np.float32)
x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, P("i")), lambda place: whole[place])
file = os.open(confirmed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
pause = threading.Event()
with hcb.outfeed_receiver(forward=hcb.Forward(collector, spool=spool, drain_sec=60.0)):
    for step in range(int(steps)):
        x = train(x, np.int32(step)).block_until_ready()
        os.write(file, struct.pack("<qq", step, time.monotonic_ns()))
        pause.wait(0.002)
