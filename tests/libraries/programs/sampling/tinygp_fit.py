"""tinygp: the hyperparameters of a Gaussian process by gradient descent, and its prediction."""

import jax
import jax.numpy as jnp
from tinygp import GaussianProcess, kernels

from program_edits import edits


def main():
    x = jnp.linspace(0.0, 5.0, 25)
    y = jnp.sin(x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)

    def build(params):
        kernel = jnp.exp(params["amplitude"]) * kernels.Matern32(jnp.exp(params["scale"]))
        return GaussianProcess(kernel, x, diag=jnp.exp(params["noise"]))

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(lambda params: -build(params).log_probability(y))(params)
        edits.log(loss=loss)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    wrapped, params = edits.wrap(step), {name: jnp.float32(-0.5) for name in ("amplitude", "scale", "noise")}
    losses = []
    for _ in range(20):
        params, loss = wrapped(params)
        losses.append(loss)
    conditioned = jax.jit(lambda params: build(params).condition(y, jnp.linspace(0.0, 5.0, 7)).gp.loc)(params)
    print("loss", losses[-1])
    return params, losses, conditioned
