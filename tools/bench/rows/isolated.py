"""The benchmark of isolated receivers: the time they leave to the program's own Python."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter, sleep
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from tools.bench.handlers import pace
from tools.bench.row import Row, figure
from tools.bench.separate_process import rows_of_process

PACE_SEC, PACES = 0.001, 50
TAPS = 400
"""Prints in each millisecond: more than a receiver delivers."""


def receiver_process(rounds: int) -> list[Row]:
    """A loop of pure Python on the main thread while a device prints more than its receiver can deliver.

    The device takes 1 ms a step without using a processor, as an accelerator would. Its prints go to /dev/null: from
    this process, or from the receiver's own (`process=True`). The baseline is the same loop while the untapped program
    runs.
    """
    return rows_of_process(__name__, "receiver_process_here", max(rounds // 2, 5))


def receiver_process_here(rounds: int) -> list[Row]:
    """See `receiver_process`."""

    def program(taps: int) -> Callable[[Any], Any]:
        def step(carry: Any, _: Any) -> Any:
            x = pace(carry, PACE_SEC)
            return lax.fori_loop(0, taps, lambda _, c: hcb.id_print(c * 1.0001, what="c"), x), None

        return jax.jit(lambda x: lax.scan(step, x, None, length=PACES)[0])

    tapped, untapped = program(TAPS), program(0)
    x = jnp.float32(1)
    for run in (tapped, untapped):
        with _to_nowhere():
            run(x).block_until_ready()
            hcb.barrier_wait()
    times: dict[str, list[float]] = {"untapped": [], "here": [], "isolated": []}
    delivered: dict[str, list[float]] = {"here": [], "isolated": []}
    for _ in range(rounds):
        times["untapped"].append(_timed(untapped, x)[0])
        for name in ("here", "isolated"):
            with _to_nowhere(), hcb.outfeed_receiver(process=name == "isolated", back_pressure="drop_newest"):
                time_ms, rate = _timed(tapped, x)
            times[name].append(time_ms)
            delivered[name].append(rate)
    base, here, other = (figure(times[name]) for name in ("untapped", "here", "isolated"))
    rates = {name: figure(values).median for name, values in delivered.items()}
    title = "a loop of pure Python, a saturated receiver"
    return [
        other.versus(
            base, f"{title} in a child process ({rates['isolated']:,.0f} prints/s)", "ms", "untapped", 1.1
        ),
        here.versus(base, f"{title} in this process ({rates['here']:,.0f} prints/s)", "ms", "untapped", None),
    ]


def _timed(run: Callable[[Any], Any], x: Any) -> tuple[float, float]:
    # Milliseconds of one pass of the loop, and messages a second that are delivered meanwhile.
    done = threading.Event()

    def emit() -> None:
        while not done.is_set():
            run(x).block_until_ready()

    emitter = threading.Thread(target=emit)
    emitter.start()
    sleep(0.2)
    before, started = _released(), perf_counter()
    passes = 0
    while perf_counter() - started < 0.6:
        _work()
        passes += 1
    elapsed = perf_counter() - started
    rate = (_released() - before) / elapsed
    done.set()
    emitter.join()
    hcb.barrier_wait()
    return elapsed / passes * 1e3, rate


def _work() -> int:
    total = 0
    for i in range(20_000):
        total += i & 3
    return total


def _released() -> int:
    own = [receiver.source.counters() for receiver in runtime.receivers()]
    other = [
        runtime_rings.counters()
        for reader in runtime.isolated.processes
        for runtime_rings in reader.rings._rings.values()
    ]
    return sum(counters.emitted - counters.queued_messages for counters in own + other)


@contextlib.contextmanager
def _to_nowhere() -> Iterator[None]:
    # The descriptor, which is open in a child process too.
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
