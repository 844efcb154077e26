"""optimistix: the README's implicit Euler step by a root find, least squares, and a gradient through a minimum."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

from program_edits import edits


def main():
    def dynamics(y):
        a, b = y
        return jnp.tanh(jnp.sum(a)), jnp.tanh(jnp.sum(b))

    y0, dt = (jnp.array([0.5, 1.0]), jnp.array([0.2])), 0.1

    @eqx.filter_jit
    def euler(y0):
        def residual(y, args):
            return jax.tree.map(lambda a, b, f: b + f * dt - a, y, y0, dynamics(y))

        solution = optx.root_find(residual, optx.Newton(rtol=1e-5, atol=1e-5), y0)
        edits.log(steps=solution.stats["num_steps"] * 1.0)
        return solution.value

    y1 = edits.wrap(euler)(y0)
    ts = jnp.linspace(0.0, 1.0, 20)

    def residuals(params, ts):
        return params["a"] * jnp.exp(-params["b"] * ts) - 2.0 * jnp.exp(-0.5 * ts)

    fit = optx.least_squares(
        residuals,
        optx.LevenbergMarquardt(rtol=1e-6, atol=1e-6),
        {"a": jnp.float32(1), "b": jnp.float32(1)},
        ts,
    )

    def minimum(c):
        solver = optx.BFGS(rtol=1e-5, atol=1e-5)
        return jnp.sum(optx.minimise(lambda y, c: jnp.sum((y - c) ** 4 + y**2), solver, jnp.ones(3), c).value)

    gradient = jax.jit(jax.grad(minimum))(jnp.arange(3.0))
    print("fit", fit.value, "gradient", gradient)
    return y1, fit.value, gradient
