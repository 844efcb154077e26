"""Nested loops with progress bars: a logistic map per epoch, the values of the last step behind the bar.

Run with `python examples/progress.py`; needs `pip install 'hostcallback[progress]'`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import hostcallback as hcb

EPOCHS = 4
STEPS = 300_000


def epoch(x: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Iterates the map, with a bar that begins again in each epoch."""
    x = hcb.fori_loop(0, STEPS, lambda _, x: rate * x * (1 - x), x, progress="  step")
    return x, x.mean()


@jax.jit
def run(x: jax.Array) -> jax.Array:
    """Runs all epochs."""
    bar = hcb.Progress("epoch", unit="epoch", postfix=lambda x, mean: {"mean": mean})
    return hcb.scan(epoch, x, jnp.linspace(2.8, 3.2, EPOCHS), progress=bar)[1]


if __name__ == "__main__":
    means = run(jnp.linspace(0.1, 0.9, 64))
    hcb.barrier_wait()
    print(f"{EPOCHS} epochs, the mean of the last is {means[-1]:.3f}")
