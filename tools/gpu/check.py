"""Runs the conformance programs and the benchmark rows on a real GPU.

    python tools/gpu_check.py [--rounds N] [--write]

Prints the arrived messages and a table that compares with `jax.debug.callback`. Exits with 1 if a message was wrong or
lost, and with 3 where JAX has no GPU.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from tools.bench.row import Row, measure, table
from tools.bench.timing import Counter, delivered_us, scan
from tools.gpu.conformance import CASES, uses_native_transport

NO_GPU = 3
REPORT = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
TABLE_BEGINS = "<!-- the last run of tools/gpu_check.py -->"


def find_device(platform: str) -> tuple[jax.Device | None, str]:
    """The first device of a platform, `gpu` for any GPU, or None and the reason."""
    try:
        return jax.devices(platform)[0], ""
    except RuntimeError as error:
        return None, str(error)


def conform(device: jax.Device) -> bool:
    """Runs all conformance programs and prints the result of each; returns whether every message arrived correctly."""
    good = True
    for case in CASES:
        start = perf_counter()
        try:
            result = f"{case(device):,} messages"
        except Exception:
            good, result = False, f"FAILED\n{traceback.format_exc()}"
            _forget_failures()
        print(f"{case.__name__}: {result} ({perf_counter() - start:.1f} s)", flush=True)
    for receiver in runtime.receivers():
        counters = receiver.source.counters()
        if counters.unpinned:
            print(f"{receiver.name}: {counters.unpinned} copies went through memory that could not be pinned")
        if counters.dropped or counters.queued_messages:
            good = False
            print(f"{receiver.name}: FAILED: {counters}")
    return good


def _forget_failures() -> None:
    # Deferred messages of the failed case belong to it, not to the next case.
    try:
        hcb.barrier_wait(timeout_sec=30)
    except Exception:
        traceback.print_exc()


def _scan_row(name: str, x: Any, steps: int, peer_steps: int, rounds: int) -> Row:
    mine, theirs = Counter(), Counter()
    ours = scan(jax.jit, lambda c: hcb.id_tap(mine, c), steps)
    peer = scan(jax.jit, lambda c: jax.debug.callback(theirs, c, ordered=True), peer_steps)
    sides = [
        lambda: delivered_us(lambda: ours(x), hcb.barrier_wait, steps),
        lambda: delivered_us(lambda: peer(x), jax.effects_barrier, peer_steps),
    ]
    figures = measure(sides, rounds)
    assert mine.count == steps * (rounds + 1), f"{mine.count} messages of ours"
    assert theirs.count == peer_steps * (rounds + 1), f"{theirs.count} messages of the peer's"
    return figures[0].versus(figures[1], name, "us/message", "jax.debug.callback(ordered=True)", None)


def scalar_in_scan(device: jax.Device, rounds: int) -> list[Row]:
    """A float32 scalar tapped in every step of a scan."""
    x = jax.device_put(jnp.float32(1), device)
    return [_scan_row("scalar tap in a scan, delivered in order", x, 5_000, 500, rounds)]


def large_array(device: jax.Device, rounds: int) -> list[Row]:
    """An array of 16 MiB tapped in every step of a scan."""
    x = jax.device_put(jnp.ones(4 << 20, jnp.float32), device)
    return [_scan_row("16 MiB array in a scan, delivered in order", x, 20, 20, rounds)]


def training_loop(device: jax.Device, rounds: int) -> list[Row]:
    """The demo's loop, one compiled call, with ten metrics a step: tapped, by jax.debug.callback, untapped."""
    steps, width, taps = 100, 1024, 10
    key = jax.random.key(0)
    shapes = [(64, width), (width, width), (width, width), (width, 10)]
    weights = jax.device_put([jax.random.normal(key, shape) / shape[0] ** 0.5 for shape in shapes], device)
    generator = np.random.default_rng(0)
    images = jax.device_put(generator.uniform(size=(steps, 128, 64)).astype(np.float32), device)
    labels = jax.device_put(generator.integers(0, 10, (steps, 128)), device)

    def loss(weights: Any, image: Any, label: Any) -> Any:
        for weight in weights[:-1]:
            image = jax.nn.relu(image @ weight)
        scores = jax.nn.log_softmax(image @ weights[-1])
        return -jnp.take_along_axis(scores, label[:, None], 1).mean()

    def loop(jit: Any, tap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(weights: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(weights, *batch)
            norms = [jnp.linalg.norm(array) for array in (*gradients, *weights)]
            metrics = [value, jnp.max(batch[0]), *norms][:taps]
            for metric in metrics:
                tap(metric)
            # Returned, so that XLA computes them on every side.
            return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], metrics

        compiled: Callable[[Any], Any] = jit(lambda weights: lax.scan(step, weights, (images, labels)))
        return compiled

    mine, theirs = Counter(), Counter()
    sides = [
        (loop(jax.jit, lambda metric: hcb.id_tap(mine, metric)), hcb.barrier_wait),
        (loop(jax.jit, lambda metric: jax.debug.callback(theirs, metric, ordered=True)), jax.effects_barrier),
        (loop(jax.jit, lambda metric: None), lambda: None),
    ]
    ours, peer, untapped = measure(
        [partial(delivered_us, partial(train, weights), barrier, steps) for train, barrier in sides], rounds
    )
    assert mine.count == theirs.count == taps * steps * (rounds + 1), (mine.count, theirs.count)
    name = "training loop, 10 taps a step"
    return [
        ours.versus(peer, name, "us/step", "jax.debug.callback(ordered=True)", None),
        ours.versus(untapped, name, "us/step", "the untapped loop", None),
    ]


def main(argv: list[str] | None = None) -> int:
    """Checks, measures, prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds per row (default 7); 0 for no rows")
    parser.add_argument(
        "--platform", default="gpu", help="another platform than a GPU, to try this program itself"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    args = parser.parse_args(argv)
    device, reason = find_device(args.platform)
    if device is None:
        print(
            f"gpu_check: JAX has no device of the platform {args.platform!r} here, so nothing was checked: {reason}"
        )
        return NO_GPU
    # Everything runs where it would by default, and eager operations too.
    jax.config.update("jax_default_device", device)
    hcb.barrier_wait()
    described = f"{device.device_kind}, JAX {jax.__version__}, {len(jax.devices(args.platform))} device(s)"
    print(f"{described}, {'native' if uses_native_transport(device) else 'callback'} transport", flush=True)
    good = conform(device)
    rows: list[Row] = []
    for benchmark in (scalar_in_scan, large_array, training_loop) if args.rounds else ():
        try:
            rows += benchmark(device, args.rounds)
        except AssertionError as error:
            good = False
            print(f"{benchmark.__name__}: FAILED: {error}")
    print(f"\n{table(rows)}\n\n{'everything arrived' if good else 'messages were WRONG or LOST'}")
    if args.write and good:
        head = REPORT.read_text(encoding="utf-8").partition(TABLE_BEGINS)[0]
        text = f"{head}{TABLE_BEGINS}\n\n{date.today().isoformat()}, {described}:\n\n{table(rows)}\n"
        REPORT.write_text(text, encoding="utf-8")
    return 0 if good else 1
