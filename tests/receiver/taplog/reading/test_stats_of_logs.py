"""The counts of a log's messages and the times of places in it, as `hcb stats` shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.sinks.times import DEVICE, PROGRAM, SECONDS, START
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.tap_stats import gather
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import BEGIN_NS, LOSS, NORM, SECOND, block_of, frame, log_in

OF_PLACE = ["dict", [["value", SECONDS], ["value", START]], [["array"], ["array"]]]
TIMED = replace(
    LOSS, name="parts", consumer_id=99, kind="time", params={"axes": {PROGRAM: [DEVICE], "mlp": [DEVICE]}}, kwargs={},
    transforms=(), tree=["dict", [["value", PROGRAM], ["value", "mlp"]], [OF_PLACE, OF_PLACE]],
)  # fmt: skip
CALLS = 12
SLOW = 7


def test_the_times_of_places_are_in_the_stats_with_the_slowest_steps(tmp_path: Path) -> None:
    start = np.zeros((1, 1, 2), np.uint32)
    with log_in(tmp_path) as log:
        log.describe(TIMED)
        frames = []
        for call in range(CALLS):
            mlp = np.full((1, 1), 3.0 if call == SLOW else 0.25, np.float32)
            frames += [
                frame(LOSS, np.float32(call), np.int32(call), seq=2 * call, run_id=call),
                frame(TIMED, mlp + np.float32(0.5), start, mlp, start, seq=2 * call + 1, run_id=call),
            ]
        log.append("cpu:0", block_of(*frames))
    found = gather(LogReader(tmp_path).message_runs(Selection(), by_time=False), Selection(), 3)
    counted = {tap.name: (tap.messages, tap.first_step, tap.last_step) for tap in found.taps.values()}
    assert counted == {"loss": (CALLS, 0, CALLS - 1), "parts": (CALLS, 0, CALLS - 1)}
    mlp_row, whole = found.times["parts"].rows()
    assert (mlp_row.place, mlp_row.count, mlp_row.max, mlp_row.max_at) == ("mlp", CALLS, 3.0, f"step {SLOW}")
    assert (whole.count, whole.max) == (CALLS, 3.5)
    slowest, *others = found.times["parts"].slowest()
    assert (slowest.step, [place.place for place in slowest.places]) == (SLOW, ["mlp"])
    assert len(others) == 2


@pytest.mark.parametrize("damage", ["axes", "stamps"])
def test_messages_without_times_are_counted_too(tmp_path: Path, damage: str) -> None:
    with log_in(tmp_path) as log:
        params = {"axes": {PROGRAM: [DEVICE], "mlp": ["queue"]}} if damage == "axes" else TIMED.params
        log.describe(replace(TIMED, params=params))
        seconds, start = np.ones((1, 1), np.float32), np.zeros((1, 1, 2), np.uint32)
        odd = frame(TIMED, seconds, start, seconds, seconds, seq=0)
        log.append("cpu:0", block_of(odd, frame(TIMED, seconds, start, seconds, start, seq=1)))
    found = gather(LogReader(tmp_path).message_runs(Selection(), by_time=False), Selection(), 3)
    assert [(tap.name, tap.messages) for tap in found.taps.values()] == [("parts", 2)]
    rows = found.times["parts"].rows()
    assert [row.count for row in rows] == ([] if damage == "axes" else [1, 1])
    assert not found.damaged


def exported(tap: TapDescriptor, *arrays: Any, seq: int) -> bytes:
    """A message of an exported program, which brings the description of its tap."""
    return frame(replace(tap, consumer_id=WHOLE_ID), tap.pack(), *arrays, seq=seq)


def test_messages_of_exported_programs_are_counted_by_the_names_that_they_bring(tmp_path: Path) -> None:
    frames = [
        exported(LOSS, np.float32(1), np.int32(3), seq=0),
        exported(NORM, np.float32(1), seq=1),
        exported(LOSS, np.float32(1), np.int32(4), seq=2),
        frame(replace(LOSS, consumer_id=WHOLE_ID), seq=3),
        frame(LOSS, np.float32(1), np.int32(9), seq=4, run_id=6),
    ]
    with log_in(tmp_path) as log:
        log.append("cpu:1", block_of(*frames))
    for selection in (Selection(), Selection(names=("loss",))):
        found = gather(LogReader(tmp_path).message_runs(selection, by_time=False), selection)
        counted = {tap.name: tap for tap in found.taps.values()}
        assert [damage.reason for damage in found.damaged] == [
            "a message cannot be decoded (a message of an exported program has no descriptor of its tap)"
        ]
        assert sorted(counted) == (["loss"] if selection.names else ["loss", "norm"])
        loss = counted["loss"]
        assert (loss.messages, loss.source_line, loss.kind, dict(loss.devices)) == (
            3, LOSS.source_line, "tap", {"cpu:1": 3},
        )  # fmt: skip
        assert (loss.first_time_ns, loss.last_time_ns) == (BEGIN_NS, BEGIN_NS + 4 * SECOND)
        assert loss.nbytes == sum(len(frames[k]) for k in (0, 2, 4))
        assert (loss.first_step, loss.last_step) == (3, 9)
        if "norm" in counted:
            assert counted["norm"].nbytes == len(frames[1])
