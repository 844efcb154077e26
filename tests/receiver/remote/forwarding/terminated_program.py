"""Emits and is then sent SIGTERM: `python terminated_program.py ADDRESS SPOOL HOW COUNT [PORT]`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

address, spool, how, count, *port = sys.argv[1:]
if how == "distributed":
    jax.distributed.initialize(f"localhost:{port[0]}", num_processes=1, process_id=0)

import hostcallback as hcb  # noqa: E402, as a program would that initializes first

heard = threading.Event()
if how == "handled":
    signal.signal(signal.SIGTERM, lambda number, frame: heard.set())


@hcb.jit
def emit(x: Any) -> Any:
    def body(carry: Any, step: Any) -> tuple[Any, None]:
        return hcb.id_tap(lambda value: None, carry + 1, name="count"), None

    return lax.scan(body, x, jnp.arange(int(count)))[0]


def wait_until_sent(forwarder: Any) -> None:
    pause = threading.Event()
    for _ in range(600):
        if forwarder.counters.messages == int(count) and not forwarder.unsent_bytes:
            return
        pause.wait(0.1)


with hcb.outfeed_receiver(forward=hcb.Forward(address, spool=spool)) as rx:
    if how == "replaced":
        signal.signal(signal.SIGTERM, lambda number, frame: heard.set())
        threading.Event().wait(2.0)  # until it is seen
    if how == "forked":
        child = multiprocessing.get_context("fork").Process(target=signal.pause)
        child.start()
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGTERM, child.exitcode
    emit(jnp.int32(0)).block_until_ready()
    os.kill(os.getpid(), signal.SIGTERM)
    if how in ("handled", "replaced"):
        assert heard.wait(60)
        wait_until_sent(rx.forwarder)
    elif how == "distributed":
        from jax.experimental import multihost_utils

        deadline, step = threading.Event(), 0
        while not multihost_utils.reached_preemption_sync_point(step):
            deadline.wait(0.1)
            step += 1
            assert step < 600
        wait_until_sent(rx.forwarder)
    else:
        signal.pause()
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # no handler of a normal end may help
