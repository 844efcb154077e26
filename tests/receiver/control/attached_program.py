"""A program that prints a line a step until its input ends: `attached_program.py`."""

from __future__ import annotations

import sys
import threading
from typing import Any

import jax.numpy as jnp

import hostcallback as hcb

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()


@hcb.jit
def step(x: Any, i: Any) -> Any:
    """Prints its number."""
    hcb.print("line {}", i)
    hcb.check(i < 10, "i is {}", i)
    return x + 1


x, count = jnp.float32(0), 0
try:
    with hcb.outfeed_receiver():
        step(x, count)
        count += 1
        sys.stdout.write("ready\n")  # in one write: taps print, too
        while not ended.wait(0.001):
            x = step(x, count)
            count += 1
except hcb.TapFunctionException as report:
    print("raised", report.exceptions[0].check.count, flush=True)
print("count", count, flush=True)
