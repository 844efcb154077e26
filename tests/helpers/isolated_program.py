"""A program whose receiver runs in a child process: `isolated_program.py SCENARIO [LOG]`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import jax.numpy as jnp
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime

scenario, log = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
COUNT = int(os.environ.get("COUNT", "2000"))


@hcb.jit
def run(x: Any) -> Any:
    """Prints its steps, a line each."""

    def step(carry: Any, i: Any) -> Any:
        hcb.print("line {}", i)
        return carry + 1, None

    return lax.scan(step, x, jnp.arange(COUNT))[0]


def reader() -> Any:
    """The process that reads."""
    return runtime.isolated.processes[0]


def kill_reader() -> None:
    """Kills it, when it has begun to deliver."""
    process = reader()
    name = process.rings.names[0]
    while not process.rings.wait_delivered(name, 50, 30):
        pass
    os.kill(process.pid, signal.SIGKILL)


def kill_me() -> None:
    """Kills this process, when it has emitted everything."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave_in_a_child() -> None:
    """Forks a child that leaves this process's receiver block, and prints the child's exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            receiver.__exit__(None, None, None)
            status = 0
        finally:
            os._exit(status)  # a forked child must not run XLA's exit handlers
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"child {status}", file=sys.stderr, flush=True)


if scenario in ("terminal closes", "preempted"):
    os.setsid()  # with a new process group, which gets the signal

print(f"pid {os.getpid()}", file=sys.stderr, flush=True)
collector = os.environ.get("COLLECTOR")
forward = hcb.Forward(collector, spool=os.environ["SPOOL"], drain_sec=60.0) if collector else None
with hcb.outfeed_receiver(process=True, record=log, forward=forward) as receiver:
    if scenario == "reader dies":
        threading.Thread(target=kill_reader).start()
    result = run(jnp.float32(0))
    if scenario == "child leaves":
        hcb.barrier_wait()
        leave_in_a_child()
        run(jnp.float32(0))
    if scenario == "terminal closes":
        result.block_until_ready()
        os.killpg(0, signal.SIGHUP)
    if scenario == "program dies":
        result.block_until_ready()
        print(f"emitted {reader().rings.emitted('cpu:0')}", file=sys.stderr, flush=True)
        kill_me()
    if scenario == "program dies emitting":
        kill_me()
    if scenario == "preempted":
        result.block_until_ready()
        os.killpg(0, signal.SIGTERM)
        threading.Event().wait(60)
rows = {row.device: row for row in receiver.stats}
print(
    "delivered",
    sum(row.delivered for row in rows.values()),
    "dropped",
    sum(row.dropped for row in rows.values()),
)
