"""A NUTS chain of numpyro as it runs.

A tap in the potential function sees each leapfrog step of the sampler, the warm-up too, while the chain runs as one
compiled loop. Needs `pip install 'hostcallback[libraries]'`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS

import hostcallback as hcb

steps = []


def potential(z):
    """A banana: x0 is a wide normal, and x1 follows its square."""
    energy = z[0] ** 2 / 8 + (z[1] - z[0] ** 2 / 2) ** 2 * 2
    # Only the value, not its cotangents: the sampler differentiates this function.
    hcb.tap(lambda at: steps.append(at["z"]), {"z": z, "energy": energy}, tap_tangents=False, name="leapfrog")
    return energy


sampler = MCMC(
    NUTS(potential_fn=potential), num_warmup=200, num_samples=300, num_chains=1, progress_bar=False
)
with hcb.outfeed_receiver():
    sampler.run(jax.random.key(0), init_params=jnp.zeros(2))
samples, path = np.asarray(sampler.get_samples()), np.array(steps)
print(f"{len(samples)} samples, from {len(path)} evaluations of the potential")

plt.figure(figsize=(7, 4), layout="constrained")
plt.plot(*path[-400:].T, "-", color="C0", linewidth=0.5, alpha=0.6, label="the last 400 leapfrog steps")
plt.plot(*samples.T, ".", color="C1", markersize=4, label="samples")
plt.xlabel("x0"), plt.ylabel("x1"), plt.legend()
plt.savefig("chain.png", dpi=90)
