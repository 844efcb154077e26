"""Which part of a step takes the time.

A block names the layers of a small transformer, and the step is not edited: the clock is read on the device, where the
inputs of a layer are there and where its results are. The table has the forward and the backward pass of each layer,
and the picture the shares of each step.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import hostcallback as hcb

STEPS, TOKENS, SIZES = 60, 128, (64, 128, 256)


def layer(weights, x):
    with hcb.span("attention"):
        x = x + jax.nn.softmax(x @ weights["mix"] @ x.T) @ x
    with hcb.span("mlp"):
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def loss(weights, x):
    for i, each in enumerate(weights):
        with jax.named_scope(f"layers/{i}"):
            x = layer(each, x)
    return jnp.mean(x**2)


@jax.jit
def step(weights, x):
    slopes = jax.grad(loss)(weights, x)
    return jax.tree.map(lambda w, slope: w - 0.1 * slope, weights, slopes)


keys = iter(jax.random.split(jax.random.key(0), 9))
weights = [
    {
        name: 0.05 * jax.random.normal(next(keys), shape)
        for name, shape in (("mix", (64, 64)), ("up", (64, 16 * size)), ("down", (16 * size, 64)))
    }
    for size in SIZES
]
x = jax.random.normal(jax.random.key(1), (TOKENS, 64))

calls = []
with hcb.outfeed_receiver() as receiver, hcb.observe(where="layers/*", what="time", tap_func=calls.append):
    for _ in range(STEPS):
        weights = step(weights, x)
print(receiver.summary())

calls = calls[1:]  # the first call is slower
places = [place for place in calls[0] if place != "program"]
shares = np.array(
    [[call[place]["seconds"] / call["program"]["seconds"] for call in calls] for place in places]
)
plt.figure(figsize=(7, 4), layout="constrained")
plt.stackplot(range(1, STEPS), 100 * shares, labels=places)
plt.xlabel("step"), plt.ylabel("% of the step"), plt.ylim(0, 100)
plt.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.savefig("time_of_parts.png", dpi=90)
