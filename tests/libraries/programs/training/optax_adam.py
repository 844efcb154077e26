"""optax: the README's fit with adam, in a scan, with a schedule and clipped gradients."""

import jax
import jax.numpy as jnp
import optax

from program_edits import edits


def main():
    xs = jnp.linspace(0.0, 1.0, 40).reshape(20, 2)
    ys = xs @ jnp.array([2.0, -1.0]) + 0.5
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(0.1, decay_steps=200))
    )

    def compute_loss(params, x, y):
        return jnp.mean(optax.l2_loss(x @ params["w"] + params["b"], y))

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(compute_loss)(params, xs, ys)
        updates, state = optimizer.update(grads, state, params)
        edits.log(loss=loss)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def fit(params):
        return edits.scan(step, (params, optimizer.init(params)), length=200)

    (params, state), losses = edits.wrap(fit)({"w": jnp.zeros(2), "b": jnp.float32(0)})
    print("final loss", losses[-1])
    return params, state, losses
