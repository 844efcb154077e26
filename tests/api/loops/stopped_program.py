"""Runs a loop that can be stopped, and says whether it was; then waits.

python stopped_program.py [signals | calls | "no loop" | "failed loop" | "own handler" | child]
"""

import contextlib
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp

import hostcallback as hcb

if "signals" in sys.argv:
    hcb.stop_on_signals()


def say_runs(*_):
    print("runs", os.getpid(), flush=True)


def body(i, x):
    if "calls" in sys.argv:  # host functions, which set handlers of SIGINT, many times a second
        x = jax.lax.cond(i % 100_000 == 50_000, lambda: hcb.call(lambda x: x, x, result_shape=x), lambda: x)
    jax.lax.cond(i == 1_000_000, lambda: hcb.callback(say_runs), lambda: None)
    return jnp.sin(x) + 1


run = jax.jit(lambda n: hcb.fori_loop(0, n, body, jnp.float32(0), stop=True, progress=False))
run(3)
if "failed loop" in sys.argv:

    def fail(x):
        raise OSError("disk full")

    def step(i, x):
        return hcb.call(fail, x, result_shape=x)

    with contextlib.suppress(Exception):
        jax.jit(lambda: hcb.fori_loop(0, 9, step, jnp.float32(0), stop=True))()[0].block_until_ready()
    with contextlib.suppress(hcb.TapFunctionException):
        hcb.barrier_wait()
if "own handler" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
    threading.Event().wait(2)  # by then the watch chains over it
if "child" in sys.argv and (pid := os.fork()):
    os.waitpid(pid, 0)
    os._exit(0)
try:
    if not {*sys.argv[1:]} <= {"signals", "calls"}:
        say_runs()
    else:
        value, count = run(10**9)
        print("stopped", 0 <= int(count) < 10**9, flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
