"""Early stopping that Python decides.

`hcb.call` asks a Python function in each epoch whether to go on; the loop is one compiled `while_loop`. The rule, ten
epochs without a better validation error, is ordinary Python with ordinary state.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import hostcallback as hcb

x = jnp.linspace(-1, 1, 24)
noise = 0.4 * jax.random.normal(jax.random.key(0), x.shape)
features = jnp.stack([jnp.cos(n * jnp.arccos(x)) for n in range(16)], axis=1)
y = jnp.sin(3 * x) + noise
fit, held_out = slice(0, None, 2), slice(1, None, 2)


class Patience:
    """Says whether to go on, and keeps what it was told."""

    def __init__(self, epochs):
        self.epochs, self.errors = epochs, []

    def __call__(self, error):
        self.errors.append(float(error))
        return np.asarray(len(self.errors) - 1 - int(np.argmin(self.errors)) < self.epochs)


patience = Patience(10)


@jax.jit
def train(w):
    def error(w, part):
        return jnp.mean((features[part] @ w - y[part]) ** 2)

    def epoch(state):
        w, _ = state
        w = jax.lax.fori_loop(0, 20, lambda _, w: w - 0.02 * jax.grad(error)(w, fit), w)
        go_on = hcb.call(patience, error(w, held_out), result_shape=jax.ShapeDtypeStruct((), jnp.bool_))
        return w, go_on

    return jax.lax.while_loop(lambda state: state[1], epoch, (w, True))[0]


train(jnp.zeros(16)).block_until_ready()
best = int(np.argmin(patience.errors))
print(
    f"stopped after {len(patience.errors)} epochs, the best was epoch {best} with {patience.errors[best]:.3f}"
)

plt.figure(figsize=(7, 3.5), layout="constrained")
plt.plot(patience.errors, "o-", markersize=3)
plt.axvline(best, color="C1", label="best epoch")
plt.xlabel("epoch"), plt.ylabel("held-out error"), plt.legend()
plt.savefig("early_stopping.png", dpi=90)
