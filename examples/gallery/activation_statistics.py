"""Activation statistics of each layer.

A tap in each layer sends the mean and the standard deviation of its activations. Two initialisations differ in whether
the signal survives twelve layers.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import hostcallback as hcb

DEPTH, WIDTH = 12, 256
deviations = {}


def note(stats, *, scale, layer):
    """Gets the statistics as NumPy arrays; `scale` and `layer` are host values, which are not traced."""
    deviations.setdefault(scale, {})[layer] = float(stats["std"])


def network(weights, x, scale):
    for layer, w in enumerate(weights):
        x = jax.nn.relu(x @ w * scale)
        hcb.id_tap(note, {"mean": x.mean(), "std": x.std()}, scale=scale, layer=layer)
    return x


weights = jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH)) / jnp.sqrt(WIDTH)
batch = jax.random.normal(jax.random.key(1), (64, WIDTH))
with hcb.outfeed_receiver():
    for scale in (1.0, 2**0.5):  # the second is He's
        jax.jit(network, static_argnums=2)(weights, batch, scale)

plt.figure(figsize=(7, 3.5), layout="constrained")
for scale, layers in deviations.items():
    plt.semilogy(list(layers), list(layers.values()), "o-", label=f"weights times {scale:.2f}")
    print(f"weights times {scale:.2f}: layer 0 {layers[0]:.3f}, layer {DEPTH - 1} {layers[DEPTH - 1]:.3f}")
plt.xlabel("layer"), plt.ylabel("standard deviation"), plt.legend()
plt.savefig("activations.png", dpi=90)
