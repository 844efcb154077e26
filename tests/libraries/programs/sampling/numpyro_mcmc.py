"""numpyro: the README's eight schools, sampled with NUTS, without its progress bar."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import TransformReparam

from program_edits import edits


def main():
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def eight_schools(sigma, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("J", 8), numpyro.handlers.reparam(config={"theta": TransformReparam()}):
            theta = numpyro.sample(
                "theta",
                dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(mu, tau)),
            )
        edits.log(tau=tau)
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)

    mcmc = MCMC(NUTS(eight_schools), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), sigma, y=y, extra_fields=("potential_energy",))
    mcmc.print_summary()
    return mcmc.get_samples(), mcmc.get_extra_fields()
