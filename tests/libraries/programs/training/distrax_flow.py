"""distrax: a normalising flow of a base distribution and bijectors, fitted by maximum likelihood."""

import distrax
import jax
import jax.numpy as jnp
import optax

from program_edits import edits


def main():
    data = jnp.exp(0.5 * jax.random.normal(jax.random.key(0), (64,)) + 1.0)
    optimizer = optax.adam(0.05)

    def flow(params):
        bijector = distrax.Chain(
            [
                distrax.Lambda(jnp.exp, jnp.log),
                distrax.ScalarAffine(params["shift"], jnp.exp(params["log_scale"])),
            ]
        )
        return distrax.Transformed(distrax.Normal(0.0, 1.0), bijector)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda params: -jnp.mean(flow(params).log_prob(data)))(params)
        updates, state = optimizer.update(grads, state)
        edits.log(loss=loss)
        return optax.apply_updates(params, updates), state, loss

    params, losses = {"shift": jnp.float32(0), "log_scale": jnp.float32(0)}, []
    wrapped, state = edits.wrap(step), optimizer.init(params)
    for _ in range(20):
        params, state, loss = wrapped(params, state)
        losses.append(loss)
    samples = flow(params).sample(seed=jax.random.key(1), sample_shape=(5,))
    print("params", params)
    return params, losses, samples
