"""gymnax: the README's environment, stepped by a random policy, over many environments by vmap and a scan."""

import gymnax
import jax
import jax.numpy as jnp

from program_edits import edits


def main():
    env, env_params = gymnax.make("CartPole-v1")

    def rollout(key):
        key, key_reset = jax.random.split(key)
        obs, state = env.reset(key_reset, env_params)

        def policy_step(carry, _):
            key, obs, state = carry
            key, key_act, key_step = jax.random.split(key, 3)
            action = env.action_space(env_params).sample(key_act)
            obs, state, reward, done, *_ = env.step(key_step, state, action, env_params)
            return (key, obs, state), (obs, reward, done)

        _, (obs, reward, done) = edits.scan(policy_step, (key, obs, state), length=100)
        return obs, reward, done

    @jax.jit
    def rollouts(keys):
        obs, rewards, done = jax.vmap(rollout)(keys)
        edits.log(reward=rewards.sum())
        return obs, rewards, done

    obs, rewards, done = edits.wrap(rollouts)(jax.random.split(jax.random.key(0), 8))
    print("rewards", rewards.sum(axis=1), "episodes", int(done.sum()))
    return obs, rewards, done, jnp.float32(1)
