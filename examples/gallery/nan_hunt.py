"""A NaN hunt in the backward pass.

The loss is finite, and its gradient is not: `sqrt` at 0 has an infinite derivative, and 0 times infinity is NaN. The
report names the operation that made the first value that is not finite, here the division in the derivative of `sqrt`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

import hostcallback as hcb


def distance(x):
    def step(total, point):
        return total + jnp.sqrt(jnp.sum((point - 1.0) ** 2)), None

    return lax.scan(step, 0.0, x)[0]


points = jnp.array([[3.0, 1.0], [1.0, 2.0], [1.0, 1.0], [0.0, 1.0]])  # the third is at the centre
gradient = jax.jit(jax.grad(distance))(points)
print("loss", distance(points), "gradient", np.asarray(gradient).tolist())

try:
    with hcb.outfeed_receiver():
        jax.jit(hcb.watch_nonfinite(jax.grad(distance)))(points)
except* hcb.NonFiniteError as group:
    for error in group.exceptions[:1]:
        print(*str(error).splitlines()[:2], sep="\n")

plt.figure(figsize=(7, 2.4), layout="constrained")
plt.imshow(np.isnan(gradient).T, cmap="Reds")
plt.xlabel("point"), plt.ylabel("coordinate"), plt.title("where the gradient is NaN")
plt.savefig("nan.png", dpi=90)
