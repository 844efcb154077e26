"""Stops twice, under the jit it is told: for tests that run it at a terminal, or without one."""

import sys

import jax
import jax.numpy as jnp

import hostcallback as hcb

jit = {"jax.jit": jax.jit, "hcb.jit": hcb.jit, "no jit": lambda f: f}[sys.argv[1]]


@jit
def step(total, i):
    total = total + i
    hcb.breakpoint()
    return total


try:
    print("total", step(step(0.0, 1), 2))
except KeyboardInterrupt:
    print("interrupted")
except (hcb.HostCallbackError, jax.errors.JaxRuntimeError) as error:
    print("ended:", type(error).__name__, error)
    try:
        hcb.barrier_wait()
    except* hcb.HostCallbackError as group:
        print("deferred", [type(error).__name__ for error in group.exceptions])
print("next", jnp.ones(2).sum())
