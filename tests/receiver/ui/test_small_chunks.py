"""Many logs that grow slowly: the index reads their small chunks together, and finds what it finds one by one."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from hostcallback.receiver.ui.index import log_index
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.index.series import chart
from hostcallback.receiver.ui.index.taps import MAX_NONFINITE, Tap
from hostcallback.receiver.ui.server.page_data import Filler
from logged_frames import LOSS, NORM, block_of, frame

LOGS, POLLS = 6, 5


def grow(log: LogWriter, number: int, poll: int) -> None:
    """Writes a chunk: two losses of one step; in one log also a number without a step, once in another an array."""
    seq = poll * 4
    frames = [
        frame(
            LOSS, np.float32(number + at / 10), np.int32(poll), seq=seq + at, time_ns=(seq + at) * 10 + number
        )
        for at in range(2)
    ]
    if number == 1:
        frames.append(frame(NORM, np.float32(poll), seq=seq + 2))
    if number == 2 and poll == 3:
        frames.append(frame(LOSS, np.full(8, 2.0, np.float32), np.int32(poll), seq=seq + 2))
    log.append("cpu:0", block_of(*frames), at_once=True)


def found_in(folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """What an index has of logs in a folder that grow while it reads them: taps, charts, devices."""
    folder.mkdir(exist_ok=True)
    index = LogIndex([folder])
    with ExitStack() as stack:
        logs = []
        for number in range(LOGS):
            log = LogWriter(folder / f"p{number}", LogOptions(run="one"))
            stack.callback(log.close)
            for described in (LOSS, NORM):
                log.describe(described)
            logs.append(log)
        for poll in range(POLLS):
            for number, log in enumerate(logs):
                grow(log, number, poll)
            index.look()
            assert not index.read_some(60.0)
    rows = sorted(index.taps.rows, key=lambda tap: (tap.name, tap.leaf))
    taps = [
        (tap.name, tap.leaf, tap.kind, tap.count, tap.last, tap.last_time, tap.without_step, list(tap.counts))
        for tap in rows
    ]
    charts = [chart(index, tap, 800, None, None, axis) for tap in rows for axis in ("step", "time")]
    devices = sorted((device.process, device.messages, device.last_ns) for device in index.devices.all())
    return taps, charts, devices


def in_order(chart: dict[str, Any]) -> dict[str, Any]:
    """A chart with the points of equal x in one order."""
    points = sorted(zip(chart["x"], chart["min"], chart["max"], chart["mean"], strict=True))
    return {**chart, "tap": None, "x": None, "min": None, "max": None, "mean": points}


def test_chunks_that_are_read_together_are_found_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = found_in(tmp_path / "together")
    monkeypatch.setattr(log_index, "TOGETHER", 1)
    alone = found_in(tmp_path / "alone")
    assert together[0] == alone[0]
    assert {tap[0] for tap in together[0]} == {"loss", "norm"}
    assert list(map(in_order, together[1])) == list(map(in_order, alone[1]))
    assert [row[1:] for row in together[2]] == [row[1:] for row in alone[2]]


def test_most_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    take = LogIndex._take_together

    def noted(self: LogIndex, reads: Any) -> bool:
        is_taken = take(self, reads)
        if is_taken:
            joined.append(len(reads))
        return is_taken

    monkeypatch.setattr(LogIndex, "_take_together", noted)
    found_in(tmp_path)
    # In each poll but the first, in which nothing is known, and the one with an array, the logs without another tap.
    assert joined == [LOGS - 1] * (POLLS - 2)


def test_the_first_values_that_are_not_finite_are_kept_in_any_order_of_chunks() -> None:
    tap = Tap(0, "run", "loss", "", "scalar", "train.py:1")
    tap.buckets.has_steps = True
    for start in (400, 200, 300):  # a log is read coarsely first
        steps = np.arange(start, start + 80)
        tap.note_nonfinite(np.full((80, 1), np.nan), steps, steps * 1e9)
    assert tap.nonfinite_count == 240
    assert [step for step, _, _ in tap.nonfinite] == [*range(200, 280), *range(300, 380)][:MAX_NONFINITE]


def test_numbers_of_less_than_a_byte_are_found_one_by_one(tmp_path: Path) -> None:
    narrow = np.dtype(ml_dtypes.int4)
    with contextlib.closing(LogWriter(tmp_path / "log", LogOptions(run="one"))) as log:
        log.describe(NORM)
        frames = [frame(NORM, np.array(number, narrow), seq=number) for number in range(3)]
        log.append("cpu:0", block_of(*frames), at_once=True)
    index = LogIndex([tmp_path])
    index.look()
    assert not index.read_some(60.0)
    (tap,) = index.taps.rows
    assert (tap.count, tap.last) == (3, 2)


def test_a_filler_with_no_page_open_uses_no_processor_time(tmp_path: Path) -> None:
    filler = Filler(LogIndex([tmp_path]))
    try:
        filler.refresh()
        clock = time.pthread_getcpuclockid(filler._thread.ident or 0)
        before = time.clock_gettime(clock)
        threading.Event().wait(0.5)
        assert time.clock_gettime(clock) - before < 0.1
    finally:
        filler.close()
