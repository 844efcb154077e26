"""Training curves of one compiled loop.

The whole training is one call of a jitted function. A batched tap collects the loss of every step, and the validation
error of each epoch comes from another tap.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

import hostcallback as hcb

x = jnp.linspace(-1, 1, 256)
y = jnp.sin(3 * x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
features = jnp.stack([x**n for n in range(8)], axis=1)

losses, validation = [], []


@jax.jit
def train(w, key):
    def step(w, key):
        batch = jax.random.choice(key, 256, (16,))
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((features[batch] @ w - y[batch]) ** 2))(w)
        hcb.tap(losses.append, loss, batched=True, name="loss")  # many steps in one call of the function
        return w - 0.1 * grad, None

    def epoch(w, key):
        w, _ = lax.scan(step, w, jax.random.split(key, 100))
        hcb.tap(
            lambda error: validation.append(float(error)),
            jnp.mean((features @ w - y) ** 2),
            name="validation",
        )
        return w, None

    return lax.scan(epoch, w, jax.random.split(key, 10))[0]


with hcb.outfeed_receiver():
    train(jnp.zeros(8), jax.random.key(1))
losses = np.concatenate(losses)
print(f"{len(losses)} steps, loss {losses[:10].mean():.3f} -> {losses[-100:].mean():.3f}")

plt.figure(figsize=(7, 3.5), layout="constrained")
plt.semilogy(losses, linewidth=0.6, alpha=0.6, label="each step")
plt.semilogy(np.arange(1, 11) * 100, validation, "o-", label="validation")
plt.xlabel("step"), plt.ylabel("mean squared error"), plt.legend()
plt.savefig("curves.png", dpi=90)
