"""The benchmarks of metrics and of taps as columns."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import threading
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
from jax import lax

import hostcallback as hcb
from tools.bench.row import Row, measure

VALUES, WIDTH = 2_000, 160
MILLION = 1_000_000


def metrics_in_a_loop(rounds: int) -> list[Row]:
    """2,000 values into TensorBoard's files from a Python loop of jitted steps, until the last step has ended.

    The peers are the same loop with `add_scalar(float(loss))` after each step, and the same loop without any metric.
    The floor is that loop while a thread calls `add_scalar` for each step that was dispatched, every millisecond.
    """

    def work(x: Any) -> Any:
        x = jnp.sin(x @ x) * 0.1
        return x, x[0, 0]

    def tapped(x: Any, i: Any) -> Any:
        x, loss = work(x)
        hcb.metrics({"loss": loss}, step=i)
        return x

    plain, ours, start = jax.jit(work), jax.jit(tapped), jnp.ones((WIDTH, WIDTH)) * 0.1
    numbers = [jnp.int32(i) for i in range(VALUES)]
    with tempfile.TemporaryDirectory() as folder:

        def with_metrics() -> float:
            with hcb.outfeed_receiver(writers=[hcb.tensorboard(folder)]) as rx:
                x, began = start, perf_counter()
                for i in numbers:
                    x = ours(x, i)
                x.block_until_ready()
                seconds = perf_counter() - began
            assert rx.writers[0].written == VALUES
            return seconds * 1e6 / VALUES

        def that_logs() -> float:
            writer = tensorboardX.SummaryWriter(folder)
            x, began = start, perf_counter()
            for i in range(VALUES):
                x, loss = plain(x)
                writer.add_scalar("loss", float(loss), i)
            x.block_until_ready()
            seconds = perf_counter() - began
            writer.close()
            return seconds * 1e6 / VALUES

        def without() -> float:
            x, began = start, perf_counter()
            for _ in numbers:
                x, _ = plain(x)
            x.block_until_ready()
            return (perf_counter() - began) * 1e6 / VALUES

        def with_thread() -> float:
            writer, written, dispatched = tensorboardX.SummaryWriter(folder), 0, 0

            def write() -> None:
                nonlocal written
                while written < VALUES:
                    while written < dispatched:
                        writer.add_scalar("loss", 0.5, written)
                        written += 1
                    sleep(1e-3)

            thread = threading.Thread(target=write)
            thread.start()
            x, began = start, perf_counter()
            for _ in numbers:
                x, _ = plain(x)
                dispatched += 1
            x.block_until_ready()
            seconds = perf_counter() - began
            thread.join()
            writer.close()
            return seconds * 1e6 / VALUES

        sides = [with_metrics, that_logs, without, with_thread]
        mine, logging, bare, least = measure(sides, rounds)
    name = "2,000 metrics into tensorboardX, a step of the loop"
    return [
        mine.versus(logging, name, "us/step", "add_scalar(float(loss)) after each step", 1.0),
        mine.versus(bare, f"{name}, against no metrics", "us/step", "the loop without metrics", 1.1),
        mine.versus(least, "the same", "us/step", "while a thread calls add_scalar", None),
    ]


def million_scalars(rounds: int) -> list[Row]:
    """A million recorded scalars as columns, with their steps and times; the limit is a second for each form."""

    def body(carry: Any, i: Any) -> Any:
        hcb.id_tap(lambda value: None, {"loss": carry, "step": i}, name="train", batched=True)
        return carry * 0.9, None

    forms = {"numpy": "to_numpy", "pandas": "to_pandas", "xarray": "to_xarray"}
    forms = {package: method for package, method in forms.items() if importlib.util.find_spec(package)}
    with tempfile.TemporaryDirectory() as folder:
        with hcb.outfeed_receiver(record=Path(folder)):
            jax.jit(lambda: lax.scan(body, jnp.float32(1), jnp.arange(MILLION))[0])().block_until_ready()

        def read(method: str) -> float:
            began = perf_counter()
            columns = getattr(hcb.read(folder)["train"], method)()
            seconds = perf_counter() - began
            assert np.array_equal(columns["step"], np.arange(MILLION))
            return seconds

        figures = measure([functools.partial(read, method) for method in forms.values()], rounds)
    names = {"numpy": "a million scalars of a tap log as columns"}
    return [
        figure.within(1.0, names.get(package, f"the same, for {package}"), "s")
        for package, figure in zip(forms, figures, strict=True)
    ]
