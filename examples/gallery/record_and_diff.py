"""Two recorded runs and their first difference.

Each run writes a tap log. `hcb diff` finds the first message in which they differ; `hcb.read` gives the values for a
picture. The second run has another rounding in one operation.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax import lax

import hostcallback as hcb


def simulate(rate_dtype):
    @jax.jit
    def run(x):
        def step(x, i):
            rate = jnp.asarray(3.9, rate_dtype).astype(jnp.float32)
            x = rate * x * (1 - x)
            hcb.tap(lambda value: None, {"step": i, "x": x}, name="map")
            return x, None

        return lax.scan(step, x, jnp.arange(60))[0]

    return run


for name, dtype in (("first", jnp.float32), ("second", jnp.float16)):
    with hcb.outfeed_receiver(record=name):
        simulate(dtype)(0.5)

diff = [sys.executable, "-m", "hostcallback.receiver.cli", "diff", "first", "second", "--rtol", "1e-2"]
found = subprocess.run(diff, capture_output=True, text=True, check=False)
print(found.stdout or found.stderr)
assert found.returncode == 1, found

plt.figure(figsize=(7, 3.5), layout="constrained")
for name in ("first", "second"):
    columns = hcb.read(name)["map"].to_numpy()
    plt.plot(columns["x"], label=name)
plt.xlabel("step"), plt.ylabel("x"), plt.legend()
plt.savefig("runs.png", dpi=90)
