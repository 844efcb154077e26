"""A program with taps that ends in one of several ways: `flying_program.py HOW [DIRECTORY]`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp

import hostcallback as hcb
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.wire.frame import encode_prefix

how, directory = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
STEPS = 20
gate = threading.Event()
seen = []


def late(state: dict[str, object], note: str) -> None:
    """A tap function that is stuck at its third message."""
    seen.append(state)
    if len(seen) == 3 and how not in ("exit", "raise"):
        gate.wait()


@hcb.jit
def step(x: jax.Array, i: jax.Array) -> jax.Array:
    """Taps a small and a large array."""
    hcb.id_tap(late, {"step": i, "x": x}, name="state", note="from the program")
    hcb.id_tap(lambda big: None, jnp.full((64, 1024), i, jnp.float32), name="big")
    hcb.check(i < 1000, "i is {}", i)
    return x + 1


def run() -> None:
    """Emits, and waits until the device has finished."""
    x = jnp.zeros(3)
    for i in range(STEPS):
        x = step(x, i)
    x.block_until_ready()
    while len(seen) < 3:
        pass


def end() -> None:
    """Ends the process."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "abort":
        os.abort()
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "raise":
        raise RuntimeError("as programs end")
    elif how == "fork":
        child = os.fork()
        if not child:
            # JAX does not work in a forked child; the ring does.
            source = RingSource.open(0)
            prefix = encode_prefix(1, 0, ())
            native_library.load().hcb_ring_append(source._ring, prefix, len(prefix))
            os._exit(source.counters().emitted != 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGKILL)


if directory is None:
    run()
    end()
else:
    run()  # before the recorder: the ring's contents then move into the file
    with hcb.outfeed_receiver(flight_recorder=directory):
        end()
