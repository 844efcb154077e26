"""Fits a line inside one compiled call, writes its metrics to files, and reads the taps back as columns.

Run it in an empty folder: it writes metrics.csv, metrics.jsonl and a folder for TensorBoard (if tensorboardX is there).
"""

import importlib.util

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb

STEPS = 300


@jax.jit
def fit(params):
    xs = jnp.linspace(-1, 1, 64)
    ys = 3 * xs + 0.5

    def loss_of(params):
        return jnp.mean((params["w"] * xs + params["b"] - ys) ** 2)

    def step(params, i):
        loss, grads = jax.value_and_grad(loss_of)(params)
        hcb.metrics({"loss": loss, "params": params, "errors": hcb.histogram(ys - params["w"] * xs)}, step=i)
        hcb.metrics({"loss_of_20_steps": loss}, step=i, every=20)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    return lax.scan(step, params, jnp.arange(STEPS))[0]


def main():
    """Fits, writes, reads."""
    writers = [hcb.csv("metrics.csv"), hcb.jsonl("metrics.jsonl")]
    if importlib.util.find_spec("tensorboardX"):
        writers.append(hcb.tensorboard("runs/line"))
    taps = hcb.capture()
    with hcb.outfeed_receiver(writers=writers, sinks=[taps]) as receiver:
        fit({"w": 0.0, "b": 0.0})
    for writer in receiver.writers:
        print(f"{writer.name}: {writer.written} records")
    first = next(iter(taps.values())).to_numpy()
    print(f"loss {first['loss'][0]:.3f} -> {first['loss'][-1]:.6f} in {len(first['step'])} steps")


if __name__ == "__main__":
    main()
