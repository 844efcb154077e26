"""A failing training step, run again elsewhere.

`log(1 + exp(score))` overflows if a score is above 88, and one row of the data was not scaled. The call that meets this
row leaves a capsule: one file with the program and its inputs. `hcb reproduce` runs it in another process, which has
neither the training script nor the data. `--bisect` runs it in 64 bits too, and names the operation that overflowed.
"""

import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hostcallback as hcb

logging.getLogger("hostcallback").setLevel(logging.ERROR)  # the capsule's path is logged as a warning too

rng = np.random.default_rng(0)
features = rng.normal(size=(60, 32, 4)).astype(np.float32)  # 60 batches
labels = (features @ [1.0, -2.0, 0.5, 1.0] > 0).astype(np.float32)
features[37, 5] *= 50  # the row that was not scaled
optimizer = optax.adam(0.1)


def loss_fn(weights, x, y):
    score = x @ weights
    return jnp.mean(jnp.log(1 + jnp.exp(score)) - y * score)  # jax.nn.softplus(score) does not overflow


def train_step(weights, state, x, y):
    loss, gradient = jax.value_and_grad(loss_fn)(weights, x, y)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(weights, updates), state, loss


step = hcb.capsule(jax.jit(train_step), "capsules", nonfinite=True, max_capsules=1)
weights = jnp.zeros(4)
state = optimizer.init(weights)
try:
    with hcb.outfeed_receiver():
        for x, y in zip(features, labels, strict=True):
            weights, state, loss = step(weights, state, x, y)
except* hcb.NonFiniteError as group:
    print("the training failed:", str(group.exceptions[0]).splitlines()[0])

(capsule,) = Path("capsules").iterdir()
capsule = capsule.rename("failed.hcb")  # one file, to copy to another machine
reproduce = [sys.executable, "-m", "hostcallback.receiver.cli", "reproduce", capsule]
for options in ([], ["--bisect"]):
    again = subprocess.run([*reproduce, *options], capture_output=True, text=True, check=False)
    print("\n$ hcb", *reproduce[3:], *options)
    print(again.stdout.strip() or again.stderr)
    print("exit status", again.returncode)
