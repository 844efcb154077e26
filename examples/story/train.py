"""A training that goes wrong: a classifier of handwritten digits, whose loss becomes NaN.

docs/story.md tells how the cause is found.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hostcallback as hcb

optimizer = optax.adam(5e-3)
rng = np.random.default_rng(0)


def batches(steps):
    table = np.loadtxt(Path(__file__).resolve().parents[1] / "digits.csv.gz", delimiter=",", dtype=np.float32)
    images, labels = table[:, :-1] / 16, table[:, -1].astype(int)
    images[rng.choice(len(images), 6, replace=False)] *= 16 * 16  # six scans of another scanner: 0..256
    for _ in range(steps):
        chosen = rng.integers(len(images), size=64)
        yield images[chosen], labels[chosen]


def loss_fn(weights, images, labels):
    hidden = jax.nn.relu(images @ weights["hidden"])
    scores = hidden @ weights["out"]
    probabilities = jax.nn.softmax(scores)
    return -jnp.mean(jnp.log(probabilities[jnp.arange(len(labels)), labels]))


@jax.jit
def step(weights, state, images, labels, number):
    loss, gradient = jax.value_and_grad(loss_fn)(weights, images, labels)
    hcb.metrics({"loss": loss, "gradient": optax.global_norm(gradient)}, step=number)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(weights, updates), state, loss


def train(steps=400):
    weights = {"hidden": 0.1 * jax.random.normal(jax.random.key(0), (64, 32)), "out": jnp.zeros((32, 10))}
    state = optimizer.init(weights)
    for number, (images, labels) in enumerate(batches(steps)):
        weights, state, loss = step(weights, state, images, labels, number)
        if number % 50 == 49:
            print(f"step {number}: loss {loss:.3f}")


with hcb.outfeed_receiver(record="runs/first"):
    train()
