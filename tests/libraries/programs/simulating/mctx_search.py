"""mctx: Gumbel MuZero's search with a small model, and its policy."""

import jax
import jax.numpy as jnp
import mctx

from program_edits import edits


def main():
    batch, actions = 4, 3

    def recurrent_fn(params, key, action, embedding):
        embedding = embedding + jax.nn.one_hot(action, actions)
        reward = jnp.tanh(embedding @ params["reward"])
        edits.log(reward=reward.mean())
        return (
            mctx.RecurrentFnOutput(
                reward=reward,
                discount=jnp.full(batch, 0.9),
                prior_logits=embedding @ params["policy"],
                value=embedding @ params["value"],
            ),
            embedding,
        )

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "reward": jax.random.normal(keys[0], (actions,)),
        "policy": jax.random.normal(keys[1], (actions, actions)),
        "value": jax.random.normal(keys[2], (actions,)),
    }

    @jax.jit
    def search(params, key):
        root = mctx.RootFnOutput(
            prior_logits=jnp.zeros((batch, actions)),
            value=jnp.zeros(batch),
            embedding=jnp.zeros((batch, actions)),
        )
        return mctx.gumbel_muzero_policy(params, key, root, recurrent_fn, num_simulations=16)

    output = edits.wrap(search)(params, jax.random.key(1))
    print("actions", output.action)
    return output.action, output.action_weights, output.search_tree.node_values
