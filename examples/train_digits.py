"""Trains a digit classifier whose whole training is one compiled call, and watches it from inside.

Taps in the compiled loop print the loss as it falls and hand every step's metrics to Python, while the device goes on
computing. Run it, then try --raise-in-tap, to see how a failing tap function is reported.
"""

import argparse
import sys
import traceback
from collections import defaultdict
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hostcallback as hcb

BATCH_SIZE = 32


class History:
    """A tap function of the program: collects the metrics of each step, as lists of Python floats by name."""

    def __init__(self):
        self.columns = defaultdict(list)

    def __call__(self, metrics):
        for name, value in metrics.items():
            self.columns[name].append(value.item())


def fail_on_some_steps(metrics):
    """A tap function with a bug: it raises on round numbers."""
    step = metrics["step"].item()
    if step % 500 == 0:
        raise ValueError(f"step {step} is a round number")


def make_train(static, optimizer, images, labels, *, epochs, every, tap_funcs):
    """Returns `train(params, key) -> params`, to be compiled as a whole: scans over epochs and steps."""
    steps_per_epoch = len(images) // BATCH_SIZE

    def loss_and_accuracy(params, batch_images, batch_labels):
        logits = jax.vmap(eqx.combine(params, static))(batch_images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch_labels)
        return losses.mean(), (logits.argmax(-1) == batch_labels).mean()

    def train_step(state, batch):
        params, opt_state, step = state
        batch_images, batch_labels = images[batch], labels[batch]

        (loss, accuracy), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(
            params, batch_images, batch_labels
        )
        metrics = {
            "step": step,
            "loss": loss,
            "accuracy": accuracy,
            "grad_norm": optax.tree.norm(grads),
        }

        # The taps: every step's metrics go to Python functions, every N-th step is printed.
        for tap_func in tap_funcs:
            hcb.id_tap(tap_func, metrics)
        lax.cond(
            step % every == 0,
            lambda: hcb.id_print({"step": step, "loss": loss}, what="train"),
            lambda: {"step": step, "loss": loss},
        )

        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, step + 1), None

    def train_epoch(state, key):
        order = jax.random.permutation(key, len(images))[: steps_per_epoch * BATCH_SIZE]
        return lax.scan(train_step, state, order.reshape(steps_per_epoch, BATCH_SIZE))

    def train(params, key):
        state = (params, optimizer.init(params), jnp.int32(0))
        (params, _, _), _ = lax.scan(train_epoch, state, jax.random.split(key, epochs))
        return params

    return train


def plot(history, path):
    """Writes the curves of every step to an image file."""
    figure = Figure(figsize=(7, 7), layout="constrained")
    curves = ("loss", "grad_norm", "accuracy")
    for axes, name in zip(figure.subplots(len(curves), sharex=True), curves, strict=True):
        axes.plot(history["step"], history[name], linewidth=0.7)
        axes.set(ylabel=name.replace("_", " "), yscale="linear" if name == "accuracy" else "log")
    axes.set(xlabel="step")
    figure.savefig(path, dpi=120)


def positive(text):
    """Reads a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--every", type=positive, default=100, help="print the loss every N steps")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    parser.add_argument("--raise-in-tap", action="store_true", help="let a tap function fail")
    options = parser.parse_args()

    digits = load_digits()  # 1,797 images of 8 x 8 pixels, from 0 to 16
    images, validation_images, labels, validation_labels = train_test_split(
        np.float32(digits.data / 16), digits.target, test_size=0.2, random_state=0
    )

    model_key, train_key = jax.random.split(jax.random.key(0))
    model = eqx.nn.MLP(in_size=64, out_size=10, width_size=128, depth=2, key=model_key)
    params, static = eqx.partition(model, eqx.is_array)

    history = History()
    train = make_train(
        static,
        optax.adam(1e-3),
        jnp.asarray(images),
        jnp.asarray(labels),
        epochs=options.epochs,
        every=options.every,
        tap_funcs=[history, fail_on_some_steps] if options.raise_in_tap else [history],
    )

    # Leaving the block waits until every message emitted inside it has been delivered, and raises the errors of tap
    # functions. A failing tap function stops neither the training nor another tap function.
    failures = None
    try:
        with hcb.outfeed_receiver(receiver_name="train_digits") as receiver:
            params = jax.jit(train)(params, train_key)
    except hcb.TapFunctionException as exception:
        failures = exception

    logits = jax.vmap(eqx.combine(params, static))(validation_images)
    accuracy = np.mean(logits.argmax(-1) == validation_labels)
    plot(history.columns, options.output)
    steps = len(history.columns["step"])
    print(f"\n{steps} steps, validation accuracy {accuracy:.1%}, curves in {options.output}")
    print(receiver.summary())
    if failures is not None:
        traceback.print_exception(failures)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
