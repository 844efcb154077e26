"""Trains a digit classifier whose whole training is one compiled call, and watches it from inside.

Taps in the compiled loop print the loss, move a progress bar and hand the metrics of every step and every epoch to
Python, while the device goes on computing. At the end a table says what that cost. Run it, then try --raise-in-tap, to
see how a failing tap function is reported.
"""

import argparse
import contextlib
import io
import itertools
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import hostcallback as hcb

DIGITS = Path(__file__).with_name("digits.csv.gz")
"""1,797 images of 8 x 8 pixels, from 0 to 16, and their digits, from 0 to 9: the test set of "Optical Recognition of
Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, CC BY 4.0."""

BATCH_SIZE = 32
SIZES = (64, 256, 256, 10)
"""The width of the classifier's layers, from the pixels to the digits."""


class History:
    """A tap function of the program: collects metrics, as lists of Python numbers by name."""

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


def load_digits():
    """Returns the images and digits for training, then those for validation."""
    data = np.loadtxt(DIGITS, delimiter=",", dtype=np.float32)
    data = np.random.default_rng(0).permutation(data)
    images, digits = jnp.asarray(data[:, :-1] / 16), jnp.asarray(data[:, -1], jnp.int32)
    count = len(data) * 4 // 5
    return images[:count], digits[:count], images[count:], digits[count:]


def init_params(key):
    """Returns the weights and biases of the layers."""
    shapes = list(itertools.pairwise(SIZES))
    keys = jax.random.split(key, len(shapes))
    return [
        (jax.random.normal(key, (n, m)) * jnp.sqrt(2 / n), jnp.zeros(m))
        for key, (n, m) in zip(keys, shapes, strict=True)
    ]


def loss_and_accuracy(params, images, digits):
    """Returns the mean cross entropy, and the share of images whose digit is right."""
    *hidden, (weights, bias) = params
    x = images
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    logits = x @ weights + bias
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits)
    return losses.mean(), (logits.argmax(-1) == digits).mean()


def make_train(data, *, epochs, every, on_step=(), on_epoch=(), bar=False, returns_metrics=False):
    """Returns `train(params, key) -> params`, to be compiled as a whole: scans over epochs and steps.

    `on_step` and `on_epoch` are tap functions of the metrics. Without any, the program has no taps. `bar` shows a bar.
    `returns_metrics` makes it `train(params, key) -> (params, (metrics of each step, metrics of each epoch))`.
    """
    images, digits, validation_images, validation_digits = data
    steps_per_epoch = len(images) // BATCH_SIZE
    optimizer = optax.adam(1e-3)

    def train_step(state, batch):
        params, opt_state, step = state
        (loss, accuracy), grads = jax.value_and_grad(loss_and_accuracy, has_aux=True)(
            params, images[batch], digits[batch]
        )
        metrics = {"step": step, "loss": loss, "accuracy": accuracy, "grad_norm": optax.tree.norm(grads)}
        if on_step:
            # The taps: every step's metrics go to Python functions, every N-th step is printed, a bar moves.
            for tap_func in on_step:
                hcb.id_tap(tap_func, metrics)
            lax.cond(
                step % every == 0,
                lambda: hcb.print("step {:>5}  loss {:.4f}  accuracy {:6.1%}", step, loss, accuracy),
                lambda: None,
            )
        if bar:
            hcb.progress(epochs * steps_per_epoch, step=step, desc="train", unit="step", loss=loss)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        state = (optax.apply_updates(params, updates), opt_state, step + 1)
        return state, metrics if returns_metrics else None  # XLA leaves out metrics that nothing uses

    def train_epoch(state, key):
        order = jax.random.permutation(key, len(images))[: steps_per_epoch * BATCH_SIZE]
        state, of_steps = lax.scan(train_step, state, order.reshape(steps_per_epoch, BATCH_SIZE))
        loss, accuracy = loss_and_accuracy(state[0], validation_images, validation_digits)
        validation = {"step": state[2], "loss": loss, "accuracy": accuracy}
        for tap_func in on_epoch:
            hcb.id_tap(tap_func, validation)
        return state, (of_steps, validation) if returns_metrics else None

    def train(params, key):
        state = (params, optimizer.init(params), jnp.int32(0))
        (params, _, _), metrics = lax.scan(train_epoch, state, jax.random.split(key, epochs))
        return (params, metrics) if returns_metrics else params

    return jax.jit(train)


def smoothed(values, weight=0.9):
    """Returns the exponential moving average, corrected for its start."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(average / total)
    return result


def plot(steps, epochs, path):
    """Writes the curves to an image file: each step, the average over steps, and the validation after each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 8), layout="constrained")
    figure.suptitle("Training of a digit classifier in one compiled call, as seen by its taps")
    names = {"loss": "cross entropy", "accuracy": "accuracy", "grad_norm": "norm of the gradient"}
    for axes, (name, label) in zip(figure.subplots(len(names), sharex=True), names.items(), strict=True):
        axes.plot(steps["step"], steps[name], color="C0", alpha=0.25, linewidth=0.6, label="each step")
        axes.plot(steps["step"], smoothed(steps[name]), color="C0", linewidth=1.6, label="moving average")
        if name in epochs:
            axes.plot(
                epochs["step"],
                epochs[name],
                "o-",
                color="C1",
                markersize=3,
                linewidth=1.2,
                label="validation",
            )
        axes.set(ylabel=label, yscale="linear" if name == "accuracy" else "log")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right" if name == "accuracy" else "upper right")
    axes.set(xlabel="step")
    figure.savefig(path, dpi=120)


def cost_of_taps(with_taps, programs, params, key, steps):
    """Returns a table: the seconds of the training, of its `programs` by name. The best of five runs each, in turn.

    The taps cost what the program with taps takes longer than the one that computes the same metrics and returns them.
    """
    programs = {**programs, "with its taps": with_taps}
    best = dict.fromkeys(programs, np.inf)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for train in programs.values():
            jax.block_until_ready(train(params, key))  # compiles
        for _ in range(5):
            for name, train in programs.items():
                since = time.perf_counter()
                jax.block_until_ready(train(params, key))
                hcb.barrier_wait()
                best[name] = min(best[name], time.perf_counter() - since)
    *_, returned, ours = best.values()
    rows = [
        (f"training {name}", f"{sec:.3f} s", f"{sec / steps * 1e6:.1f} us a step")
        for name, sec in best.items()
    ]
    rows += [
        (
            "what the taps cost",
            f"{ours / returned - 1:+.1%}",
            f"{(ours - returned) / steps * 1e6:+.1f} us a step",
        )
    ]
    return "\n".join(f"{name:<34}{total:>10}{each:>20}" for name, total, each in rows)


def positive(text):
    """Reads a number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--every", type=positive, default=100, help="print the loss every N steps")
    parser.add_argument("--output", type=Path, default=Path("loss.png"))
    parser.add_argument("--raise-in-tap", action="store_true", help="let a tap function fail")
    return parser.parse_args()


def main():
    options = parse_options()
    data = load_digits()
    params_key, train_key = jax.random.split(jax.random.key(0))
    params = init_params(params_key)
    steps = options.epochs * (len(data[0]) // BATCH_SIZE)

    per_step, per_epoch = History(), History()
    sizes = {"epochs": options.epochs, "every": options.every}
    on_step = [per_step, fail_on_some_steps] if options.raise_in_tap else [per_step]
    train = make_train(data, on_step=on_step, on_epoch=[per_epoch], bar=sys.stderr.isatty(), **sizes)

    # Leaving the block waits until every message emitted inside it has been delivered, and raises the errors of tap
    # functions. A failing tap function stops neither the training nor another tap function.
    failures = None
    try:
        with hcb.outfeed_receiver(receiver_name="train_digits") as receiver:
            trained = train(params, train_key)
    except hcb.TapFunctionException as exception:
        failures = exception

    _, accuracy = loss_and_accuracy(trained, *data[2:])
    seen = len(per_step.columns["step"])
    print(f"\n{seen} steps, validation accuracy {accuracy:.1%}")
    print(receiver.summary())
    status = 0
    try:
        plot(per_step.columns, per_epoch.columns, options.output)
        print(f"curves in {options.output}")
    except (OSError, ValueError, ImportError) as error:
        print(f"{options.output} could not be written: {error}", file=sys.stderr)
        status = 1
    if failures is not None:
        traceback.print_exception(failures)
        return 1
    untapped = {
        "without metrics": make_train(data, **sizes),
        "that returns its metrics": make_train(data, **sizes, returns_metrics=True),
    }
    print(f"\n{cost_of_taps(train, untapped, params, train_key, steps)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
