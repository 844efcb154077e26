"""The benchmarks of failure capsules: writing one, a step that may leave one, and the time until it is there."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcallback as hcb
from hostcallback.receiver.capsule.file_format import CapsuleWriter, Failure, Input, Shard
from tools.bench.row import LIMIT, Row, compare
from tools.bench.rows.checks import training_step, transformer_step

MIB = 128


def capsule_written(rounds: int) -> Row:
    """A capsule with an input of 128 MiB; the peer writes the same bytes to a file in the same folder and syncs it."""
    array = np.random.default_rng(0).integers(0, 255, MIB << 20, np.uint8)
    shard = Shard("", 0, (0,), array.shape)
    entry = Input("args[0]", "uint8", array.shape, (shard,), (), (), "")
    failure = Failure("check", "x", "model.py:1", "x is 1", "cpu:0")
    with tempfile.TemporaryDirectory() as folder:

        def ours() -> float:
            start = perf_counter()
            writer = CapsuleWriter(Path(folder, "ours.hcb"), 1 << 30)
            writer.add_inputs([(entry, [array])])
            writer.finish({"name": "step", "call": 0}, failure)
            return (perf_counter() - start) / MIB * 1e3

        def plain() -> float:
            start = perf_counter()
            with Path(folder, "plain").open("wb") as file:
                file.write(array.data)
                file.flush()
                os.fsync(file.fileno())
            return (perf_counter() - start) / MIB * 1e3

        return compare(
            "writing a capsule", "ms/MiB", ours, plain, "one write and fsync of the bytes", 2.0, rounds
        )


def capsule_step(rounds: int) -> list[Row]:
    """Steps under `hcb.capsule(nonfinite=True)` that do not fail, inside a receiver; the peer is the bare step.

    Three times the rounds of other rows, and a third of the steps: the bounds are 2 and 5 %.
    """
    rows = []
    cases = (("demo's", *training_step(lambda x: None), 100), ("transformer's", *transformer_step(), 3))
    with tempfile.TemporaryDirectory() as folder, hcb.outfeed_receiver():
        for name, step, arguments, steps in cases:
            for donated in (False, True):
                options = {"donate_argnums": tuple(range(len(arguments)))} if donated else {}
                bare = jax.jit(step, **options)
                held = hcb.capsule(jax.jit(step, **options), folder, nonfinite=True)
                # A donated state is copied once, by one pass over its memory.
                bound = None if donated else 1.02 if name == "transformer's" else 1.05
                what = ", its state donated" if donated else ""
                rows.append(
                    compare(
                        f"the {name} training step under `hcb.capsule`, without a failure{what}", "us/step",
                        partial(_in_turn, held, arguments, steps), partial(_in_turn, bare, arguments, steps),
                        "the bare step", bound, 3 * rounds,
                    )
                )  # fmt: skip
    return rows


def _in_turn(step: Any, arguments: tuple[Any, ...], steps: int) -> float:
    arguments = jax.tree.map(jnp.copy, arguments)  # they may be donated
    start = perf_counter()
    for _ in range(steps):
        arguments = step(*arguments)
    jax.block_until_ready(arguments)
    return (perf_counter() - start) / steps * 1e6


def capsule_of_a_failure(rounds: int) -> Row:
    """From the call of the demo's step whose check fails to the finished file; the three programs are exported."""
    step, (params, state) = training_step(lambda x: hcb.check(jnp.isfinite(x).all(), "a leaf is not finite"))
    bad = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), params)

    def seconds() -> float:
        with tempfile.TemporaryDirectory() as folder:
            held = hcb.capsule(jax.jit(step), folder)
            jax.block_until_ready(held(params, state))  # compiled
            hcb.barrier_wait()
            start = perf_counter()
            held(bad, state)
            failed = False
            try:
                hcb.barrier_wait()
            except hcb.TapFunctionException:
                failed = True
            taken = perf_counter() - start
            assert failed
            assert len(list(Path(folder).glob("*.hcb"))) == 1
            return taken

    name = "from a failed check in the demo's step to the finished capsule"
    return compare(name, "s", seconds, lambda: 5.0, LIMIT, 1.0, min(rounds, 3))
