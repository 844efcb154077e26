"""Under `vmap`, the steps of a loop with a bar are those of two nested loops of JAX, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

Loop = Callable[[int, int, Callable[[Any, Any], Any], Any], Any]

STEPS = 300
BATCH = jax.random.normal(jax.random.key(0), (64, 8))
TARGETS = BATCH @ jnp.arange(8.0) + 0.1


def nested(lower: int, upper: int, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """A `fori_loop` as two loops of JAX, without a bar."""

    def steps(state: Any) -> Any:
        step, end, value = state
        step, _, value = jax.lax.while_loop(
            lambda state: state[0] < state[1],
            lambda state: (state[0] + 1, state[1], body(state[0], state[2])),
            (step, end, value),
        )
        return step, jnp.minimum(end * 2, upper), value

    start = (jnp.int32(lower), jnp.int32(1), init)
    return jax.lax.while_loop(lambda state: state[0] < upper, steps, start)[2]


def train(loop: Loop, hidden: int, key: Any) -> Any:
    """Trains a small network with Adam, written out."""
    first, second = jax.random.split(key)
    weights = [jax.random.normal(first, (8, hidden)), jax.random.normal(second, (hidden,))]

    def loss(weights: Any) -> Any:
        return ((jnp.tanh(BATCH @ weights[0]) @ weights[1] - TARGETS) ** 2).mean()

    def step(number: Any, state: Any) -> Any:
        weights, mean, square = state
        gradient = jax.grad(loss)(weights)
        count = jnp.float32(number + 1)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)

        def update(w: Any, m: Any, s: Any) -> Any:
            return w - 0.01 * m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.999**count)) + 1e-8)

        return jax.tree.map(update, weights, mean, square), mean, square

    zeros = jax.tree.map(jnp.zeros_like, weights)
    return loop(0, STEPS, step, (weights, zeros, zeros))


@pytest.mark.slow_variants
@pytest.mark.parametrize("hidden", [1, 2, 16])
def test_a_training_under_vmap_is_that_of_two_nested_loops(hidden: int) -> None:
    # XLA lays out dimensions of 1 otherwise in nested loops, so that a lax.fori_loop may differ in the last bits.
    keys = jax.random.split(jax.random.key(1), 3)
    with_bar = jax.jit(jax.vmap(partial(train, hcb.fori_loop, hidden)))(keys)
    without = jax.jit(jax.vmap(partial(train, nested, hidden)))(keys)
    for found, expected in zip(jax.tree.leaves(with_bar), jax.tree.leaves(without), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, expected)
