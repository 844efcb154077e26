"""Checks in device code.

A check that holds sends nothing. One that fails is reported with its line, its values and its elements; the program
continues. A switch turns checks off without another compilation.
"""

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb


@jax.jit
def normalise(rows):
    def step(carry, row):
        total = row.sum()
        hcb.check(total > 0, "a row sums to {}", total)
        hcb.check(jnp.isfinite(row), "row {}", row)
        return carry, row / total

    return lax.scan(step, None, rows)[1]


rows = jnp.array([[1.0, 3.0], [2.0, -2.0], [jnp.inf, 1.0]])
try:
    with hcb.outfeed_receiver():
        normalise(rows)
except* hcb.CheckError as group:
    for error in group.exceptions:
        print(*str(error).splitlines()[:5], sep="\n", end="\n\n")  # without times

hcb.disable_checks()
with hcb.outfeed_receiver():
    normalise(rows)
print("with checks off nothing is reported")
