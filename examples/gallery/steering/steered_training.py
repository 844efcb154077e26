"""A learning rate that is changed while the program runs.

The whole training is one compiled `scan`, and its loss stays at a floor that depends on the learning rate. A tap
function sees that and lowers the knob `lr`, without recompilation. At which step the change applies depends on threads,
and the log has it: `hcb.knobs.replay` repeats the run, bit for bit.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import hostcallback as hcb
from hostcallback import receiver

STEPS, EVERY = 4000, 800
target = jnp.linspace(-1, 1, 32)


class Steering:
    """Lowers the learning rate each time that it has seen `EVERY` losses, as a person at the screen would."""

    def __init__(self):
        self.seen = 0

    def __call__(self, loss):
        self.seen += 1
        if self.seen % EVERY == 0:
            hcb.knobs["lr"] /= 4


def train(watch):
    def step(w, key):
        noise = jax.random.normal(key, (32,))
        slope = jax.grad(lambda w: jnp.mean((w - target) ** 2) * 16)(w) + noise
        w = w - hcb.knob("lr", 0.2, min=0, max=1) * slope
        loss = jnp.mean((w - target) ** 2)
        hcb.id_tap(watch, loss)
        return w, loss

    keys = jax.random.split(jax.random.key(0), STEPS)
    return np.asarray(jax.jit(lambda w: jax.lax.scan(step, w, keys)[1])(jnp.zeros(32)))


with hcb.outfeed_receiver(record="steered"):
    steered = train(Steering())
with hcb.outfeed_receiver(record="repeated"):
    hcb.knobs.replay("steered")
    repeated = train(lambda loss: None)

told = [m.value for m in receiver.LogReader("steered").messages(receiver.Selection(names=("knob/lr",)))]
changes = [
    change for change in told if change["old"] != change["new"]
]  # the first one tells the value at the start
for change in changes:
    print(f"lr {change['old']:.2g} -> {change['new']:.2g}")
print("the repeated run is the same, bit for bit:", np.array_equal(steered, repeated))

plt.figure(figsize=(7, 3.5), layout="constrained")
plt.semilogy(steered, linewidth=0.5, label="loss")
for change in changes:
    plt.axvline(change["step"], color="C1", linestyle=":")
plt.xlabel("step"), plt.ylabel("loss"), plt.legend(["loss", "lr is lowered"])
plt.savefig("steered.png", dpi=90)
