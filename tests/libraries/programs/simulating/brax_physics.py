"""brax: a physical environment with the positional backend, stepped in a scan."""

import jax
import jax.numpy as jnp
from brax import envs

from program_edits import edits


def main():
    env = envs.get_environment("inverted_pendulum", backend="positional")
    state = jax.jit(env.reset)(jax.random.PRNGKey(0))

    @jax.jit
    def rollout(state):
        def step(state, action):
            state = env.step(state, action)
            edits.log(reward=state.reward)
            return state, (state.obs, state.reward)

        return edits.scan(step, state, jnp.sin(jnp.arange(20.0))[:, None])

    state, (obs, rewards) = edits.wrap(rollout)(state)
    print("reward", rewards.sum())
    return obs, rewards, state.done
