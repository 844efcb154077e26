"""One process of a program that fails: `python job_program.py NUMBER PORT PROCESSES HOW BAD`.

Process BAD fails by HOW: "check" (in a loop of collectives), "exception", "killed" (in such a loop), or "none". By
"stop" it requests a stop of the loops that each process runs for itself, and by "stop together" of one of all: these
are without `on_error="abort"`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

number, port, processes, how, bad = (
    int(sys.argv[1]),
    sys.argv[2],
    int(sys.argv[3]),
    sys.argv[4],
    int(sys.argv[5]),
)
jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=number)

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

mesh = Mesh(np.array(jax.devices()), ("i",))
shape = (processes,)
x = jax.make_array_from_callback(
    shape, NamedSharding(mesh, P("i")), lambda place: np.zeros(shape, np.float32)[place]
)


def each(x: Any, steps: Any) -> Any:
    def body(i: Any, x: Any) -> Any:
        good = (lax.axis_index("i") != bad) | (x < 100)
        hcb.check(good | (how != "check"), "x is {}", x[0], name="bound")
        return x + 1 + 0 * lax.psum(x, "i")

    return lax.fori_loop(0, steps, body, x)


def say(*words: Any) -> None:
    print(*words, flush=True)


run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i")))
ever = 10**9
try:
    with hcb.outfeed_receiver(on_error="defer" if how.startswith("stop") else "abort"):
        run(x, 3).block_until_ready()
        if number == bad:
            say("fails", time.time())
        if how == "exception" and number == bad:
            raise ValueError("no data")
        if how == "killed" and number == bad:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if how == "stop":
            if number == bad:
                threading.Timer(0.5, hcb.request_stop, ["the test"]).start()
            loop = jax.jit(
                lambda: hcb.fori_loop(0, ever, lambda i, x: jnp.sin(x) + 1, 0.0, stop=True, progress=False)
            )
            say("stopped", int(loop()[1]) < ever)
        elif how == "stop together":

            def together(x: Any) -> Any:
                return hcb.fori_loop(0, ever, lambda i, x: x + lax.psum(x, "i"), x, stop=True, progress=False)

            jax.jit(jax.shard_map(together, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P())))(x)
        elif how != "none":
            run(x, ever).block_until_ready()
except* hcb.JobError as group:
    error = group.exceptions[0]
    say("raised", time.time(), error.process, error.source_line)
    raise
