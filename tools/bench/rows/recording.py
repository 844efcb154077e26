"""The benchmarks of the tap log: the cost that recording adds to a message, and the speed of reading a log."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

import hostcallback as hcb
from hostcallback import receiver
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.writing.recorder import Recorder
from tools.bench.row import Figure, Row, figure
from tools.bench.rows.scan import STREAM
from tools.bench.timing import Counter, delivered_us, scan


def recording(rounds: int) -> list[Row]:
    """Scalars of a scan, delivered to a Python function: with a log, less without, in turn.

    The added cost is the median of the differences of neighbouring runs. Then the same log is read: through
    `hostcallback.receiver.replay` to a Python function, and message by message as `hcb cat` reads it.
    """
    count = Counter()
    program = scan(jax.jit, lambda c: hcb.id_tap(count, c, name="bench recording"), STREAM)
    x = jnp.float32(1)

    def run(recorder: Recorder | None) -> float:
        with hcb.outfeed_receiver(record=recorder):
            return delivered_us(lambda: program(x), hcb.barrier_wait, STREAM)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        # Kept small, so that no run waits for the disk to write the data of earlier runs.
        with hcb.record(path, keep_bytes=256 << 20) as recorder:
            run(None), run(recorder)
            pairs = [(run(recorder), run(None)) for _ in range(max(rounds, 9))]
        added = figure([recorded - plain for recorded, plain in pairs])
        plain = Figure(statistics.median(plain for _, plain in pairs), 0.0)
        assert recorder.counters.lost_messages == 0
        with hcb.outfeed_receiver(record=(read := Path(folder, "read"))):
            program(x)
        replayed = figure([_per_message(partial(_replay, read, count)) for _ in range(3)])
        decoded = figure([_per_message(partial(_decode, read)) for _ in range(3)])
    name = "scalar tap in a scan, delivered and recorded: what recording adds"
    return [
        added.within(0.5, name, "us/message"),
        added.versus(plain, "the same", "us/message", "delivering it", None),
        replayed.versus(plain, "the log replayed to a Python function", "us/message", "delivering it", None),
        decoded.versus(plain, "the log read message by message", "us/message", "delivering it", None),
    ]


def _per_message(read: Any) -> float:
    start = perf_counter()
    assert read() >= STREAM  # and the values of the knobs that other rows have declared
    return (perf_counter() - start) / STREAM * 1e6


def _replay(path: Path, count: Counter) -> int:
    return receiver.replay(path, bind={"bench recording": count}).messages


def _decode(path: Path) -> int:
    return sum(1 for _ in LogReader(path).messages())
