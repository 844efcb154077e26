"""Prints the activations and gradients of a network for each step, without a change of the network's code."""

import itertools

import jax
import jax.numpy as jnp

import hostcallback as hcb

SIZES = [16, 32, 32, 4]


def network(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layers/{i}"):
            x = jnp.tanh(x @ w)
    return x


def train_step(weights, x, y):
    loss, grads = jax.value_and_grad(lambda ws: jnp.mean((network(ws, x) - y) ** 2))(weights)
    return loss, [w - 0.5 * g for w, g in zip(weights, grads, strict=True)]


def main(steps=3):
    keys = jax.random.split(jax.random.key(0), len(SIZES) + 1)
    shapes = itertools.pairwise(SIZES)
    weights = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys[2:], shapes, strict=True)]
    x, y = jax.random.normal(keys[0], (64, SIZES[0])), jax.random.normal(keys[1], (64, SIZES[-1]))

    # The three lines. With tap_func=hcb.metrics and outfeed_receiver(writers=[...]) they are written instead.
    step = jax.jit(hcb.observe(train_step, where="layers/*", what_of=["output", "grad"]))
    with hcb.outfeed_receiver():
        for _ in range(steps):
            _, weights = step(weights, x, y)


if __name__ == "__main__":
    main()
