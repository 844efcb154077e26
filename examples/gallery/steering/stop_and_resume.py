"""A run that is stopped and goes on, with the same result.

The training is one compiled loop. SIGTERM arrives, as a cluster sends it before it ends a program: the loop ends after
the iteration that runs, and its state is saved. The next start goes on from there. The result is that of a run that
nothing has stopped, bit for bit.
"""

import os
import signal

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import hostcallback as hcb

STEPS, SIGTERM_AT = 3000, 1000


def update(step, params):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (64, 8))

    def loss_of(params):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - jnp.tanh(x.sum(axis=1))) ** 2)

    loss, slope = jax.value_and_grad(loss_of)(params)
    hcb.id_tap(seen, (step, loss))
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, slope)


@jax.jit
def train(first, params):
    return hcb.fori_loop(first, STEPS, update, params, stop=True, progress=False)


losses, cluster_is_full = {}, False


def seen(value):
    step, losses[int(value[0])] = int(value[0]), float(value[1])
    if cluster_is_full and step == SIGTERM_AT:
        os.kill(os.getpid(), signal.SIGTERM)


begin = {"w": jnp.linspace(-1, 1, 128).reshape(8, 16), "v": jnp.full(16, 0.1)}
whole, _ = train(0, begin)
hcb.barrier_wait()

hcb.stop_on_signals()
losses, cluster_is_full = {}, True
stopped, count = train(0, begin)
hcb.barrier_wait()
cluster_is_full = False
np.savez("state.npz", step=count, **stopped)
print(f"stopped: {count < STEPS}, after the signal: {count > SIGTERM_AT}")

hcb.clear_stop()  # in place of the next start of the program
saved = dict(np.load("state.npz"))
first = int(saved.pop("step"))
resumed, _ = train(first, saved)
hcb.barrier_wait()
same = all(np.array_equal(resumed[name], whole[name]) for name in whole)
print("the result is that of a run without a stop, bit for bit:", same)

steps, values = np.array(sorted(losses.items())).T
plt.figure(figsize=(7, 3.5), layout="constrained")
plt.semilogy(steps[steps < first], values[steps < first], linewidth=0.5, label="until SIGTERM")
plt.semilogy(steps[steps >= first], values[steps >= first], linewidth=0.5, label="the next start")
plt.axvline(first, color="C3", linestyle=":")
plt.xlabel("step"), plt.ylabel("loss"), plt.legend()
plt.savefig("stop_and_resume.png", dpi=90)
