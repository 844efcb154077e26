"""jaxopt: ridge regression by L-BFGS, differentiated through its solution, and a projected gradient."""

import jax
import jax.numpy as jnp
import jaxopt

from program_edits import edits


def main():
    x = jax.random.normal(jax.random.key(0), (30, 5))
    y = x @ jnp.arange(5.0) + 0.1 * jax.random.normal(jax.random.key(1), (30,))

    def ridge(params, regularization, data):
        features, targets = data
        loss = 0.5 * jnp.mean((features @ params - targets) ** 2)
        return loss + 0.5 * regularization * jnp.sum(params**2)

    solver = jaxopt.LBFGS(fun=ridge, maxiter=50)

    @jax.jit
    def validation_loss(regularization):
        params = solver.run(jnp.zeros(5), regularization, (x, y)).params
        loss = jnp.mean((x @ params - y) ** 2)
        edits.log(loss=loss)
        return loss, params

    step = edits.wrap(jax.jit(jax.value_and_grad(validation_loss, has_aux=True)))
    (loss, params), gradient = step(jnp.float32(0.1))
    projected = jaxopt.ProjectedGradient(
        fun=lambda params, data: ridge(params, 0.0, data),
        projection=jaxopt.projection.projection_non_negative,
    )
    solution, state = projected.run(jnp.ones(5), data=(x, y))
    print("loss", loss, "gradient", gradient, "iterations", int(state.iter_num))
    return loss, gradient, params, solution
