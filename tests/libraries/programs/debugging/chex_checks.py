"""chex: dataclasses, static assertions, a limit on traces, and value assertions in jitted code."""

import chex
import jax
import jax.numpy as jnp

from program_edits import edits


@chex.dataclass
class State:
    position: chex.Array
    velocity: chex.Array


def main():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, force):
        chex.assert_equal_shape([state.position, state.velocity, force])
        velocity = state.velocity + 0.1 * force
        edits.log(speed=jnp.linalg.norm(velocity))
        return state.replace(position=state.position + 0.1 * velocity, velocity=velocity)

    @chex.chexify
    @jax.jit
    def log_of(x):
        chex.assert_trees_all_close(x, jnp.abs(x))
        return jnp.log(jnp.abs(x))

    wrapped, state = edits.wrap(step), State(position=jnp.zeros(3), velocity=jnp.ones(3))
    for i in range(10):
        state = wrapped(state, jnp.full(3, -float(i)))
    value = log_of(jnp.float32(2.0))
    log_of.wait_checks()
    try:
        log_of(jnp.float32(-1.0))
        log_of.wait_checks()
    except AssertionError as error:
        print("refused:", type(error).__name__)
    print("position", state.position)
    return state, value
