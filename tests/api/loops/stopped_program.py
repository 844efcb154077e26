"""Runs a loop that can be stopped, and says whether it was; then waits.

python stopped_program.py [signals | "no loop"]
"""

import sys
import threading

import jax
import jax.numpy as jnp

import hostcallback as hcb

if "signals" in sys.argv:
    hcb.stop_on_signals()
run = jax.jit(
    lambda n: hcb.fori_loop(0, n, lambda i, x: jnp.sin(x) + 1, jnp.float32(0), stop=True, progress=False)
)
run(3)
print("runs", flush=True)
try:
    if "no loop" not in sys.argv:
        value, count = run(10**9)
        print("stopped", 0 <= int(count) < 10**9, flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
