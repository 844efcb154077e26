"""Nested loops with bars, whose steps take 20 ms: `interrupted_program.py waits|fails`. A check makes it fail."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcallback as hcb

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start jobs that ignore it
FAILS = sys.argv[1] == "fails"
NOTHING = jax.ShapeDtypeStruct((), jnp.float32)


def take_a_while(i: Any) -> Any:
    """Waits."""
    threading.Event().wait(0.02)
    return np.float32(0)


def step(carry: Any, i: Any) -> Any:
    """One step of the inner loop."""
    if FAILS:
        hcb.check(i < 8, "step {}", i)
    return carry + jax.pure_callback(take_a_while, NOTHING, i), None


def epoch(carry: Any, _: Any) -> Any:
    """One step of the outer loop."""
    return hcb.scan(step, carry, jnp.arange(40), progress="inner")[0], None


with hcb.outfeed_receiver(on_error="abort" if FAILS else "defer"):
    program = jax.jit(lambda: hcb.scan(epoch, jnp.float32(0), jnp.arange(10), progress="outer")[0])
    jax.block_until_ready(program())
