"""blackjax: the README's NUTS, adapted to its target, in an inference loop over several chains."""

import blackjax
import jax
import jax.numpy as jnp
from jax.scipy import stats

from program_edits import edits


def main():
    observed = 10.0 + 20.0 * jax.random.normal(jax.random.key(1), (100,))

    def logdensity_fn(x):
        loc, log_scale = x["loc"], x["log_scale"]
        return stats.norm.logpdf(observed, loc, jnp.exp(log_scale)).sum() + log_scale

    warmup = blackjax.window_adaptation(blackjax.nuts, logdensity_fn)
    (state, parameters), _ = warmup.run(
        jax.random.key(2), {"loc": jnp.float32(1.0), "log_scale": jnp.float32(1.0)}, num_steps=50
    )
    kernel = blackjax.nuts(logdensity_fn, **parameters).step

    @jax.jit
    def inference_loop(key, state):
        def one_step(state, key):
            state, info = kernel(key, state)
            edits.log(accepted=info.acceptance_rate)
            return state, (state.position, info.num_integration_steps)

        return edits.scan(one_step, state, jax.random.split(key, 50))

    state, (positions, steps) = edits.wrap(inference_loop)(jax.random.key(3), state)
    print("mean", jax.tree.map(jnp.mean, positions), "steps", int(steps.sum()))
    return state, positions, steps, parameters
