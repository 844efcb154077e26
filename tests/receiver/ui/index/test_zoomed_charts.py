"""Charts of scalars that are kept in buckets: zoomed in, they show single messages again, along each axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.ui.index import buckets, log_index, series
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.index.series import chart
from hostcallback.receiver.ui.index.taps import Tap
from logged_frames import BEGIN_NS, LOSS, NORM, block_of, frame, log_in, losses

CHUNK, CHUNKS = 10, 4
BEGIN = BEGIN_NS / 1e9


@pytest.fixture(autouse=True)
def _buckets_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_index, "SINGLE_MESSAGES", 0)
    monkeypatch.setattr(buckets, "MESSAGES", 4)


def indexed(folder: Path) -> LogIndex:
    index = LogIndex([folder])
    index.look()
    assert not index.read_some(60.0)
    return index


def tap_of(index: LogIndex, name: str) -> Tap:
    (found,) = [tap for tap in index.taps.rows if tap.name == name]
    return found


@pytest.fixture
def stepped(tmp_path: Path) -> LogIndex:
    """The losses 0 to 39, of the steps 0 to 39, in chunks of ten."""
    with log_in(tmp_path) as log:
        for first in range(0, CHUNK * CHUNKS, CHUNK):
            log.append("cpu:0", losses(first, CHUNK), at_once=True)
    return indexed(tmp_path)


@pytest.fixture
def stepless(tmp_path: Path) -> LogIndex:
    """The norms 0 to 39 without steps, in chunks of ten."""
    with log_in(tmp_path) as log:
        for first in range(0, CHUNK * CHUNKS, CHUNK):
            frames = [frame(NORM, np.float32(k), seq=k) for k in range(first, first + CHUNK)]
            log.append("cpu:0", block_of(*frames), at_once=True)
    return indexed(tmp_path)


def points(found: dict[str, Any]) -> list[tuple[float, float]]:
    """The x and the mean of each point."""
    return list(zip(found["x"], found["mean"], strict=True))


def test_a_whole_chart_has_the_buckets(stepped: LogIndex) -> None:
    found = chart(stepped, tap_of(stepped, "loss"), 100, None, None, None)
    firsts = [first + more for first in range(0, 40, 10) for more in (0, 4, 8)]
    assert (found["axis"], found["exact"], found["count"]) == ("step", False, 40)
    assert (found["x"], found["min"]) == (firsts, firsts)
    assert found["max"] == [first + (3 if first % 10 < 8 else 1) for first in firsts]
    assert (found["first"], found["last"]) == (0, 39)


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (5, 12, range(5, 13)),
        (3, 8, range(3, 9)),
        (None, 5, range(6)),
        (34, None, range(34, 40)),
        (9.5, 10.5, [10]),
        (41, 50, []),
    ],
)
def test_a_zoomed_chart_has_the_messages_between_its_bounds(
    stepped: LogIndex, low: float | None, high: float | None, numbers: Any
) -> None:
    tap = tap_of(stepped, "loss")
    found = chart(stepped, tap, 100, low, high, "step")
    assert points(found) == [(number, number) for number in numbers]
    assert found["exact"]
    assert (found["first"], found["last"], found["count"]) == (0, 39, 40)
    start = stepped.started(tap.run)
    for axis, begin in (("time", BEGIN), ("elapsed", BEGIN - start)):
        bounds = [None if bound is None else begin + bound for bound in (low, high)]
        found = chart(stepped, tap, 100, *bounds, axis)
        assert found["axis"] == axis
        assert found["x"] == pytest.approx([begin + number for number in numbers], abs=1e-3)
        assert found["mean"] == [*numbers]


def test_messages_without_steps_are_numbered(stepless: LogIndex) -> None:
    tap = tap_of(stepless, "norm")
    for axis in (None, "step", "message"):
        assert chart(stepless, tap, 100, None, None, axis)["axis"] == "message"
    found = chart(stepless, tap, 100, 5, 12, None)
    assert points(found) == [(number, number) for number in range(5, 13)]
    assert (found["first"], found["last"], found["exact"]) == (0, 39, True)


@pytest.mark.parametrize("axis", ["step", "time"])
def test_a_chart_of_too_many_chunks_keeps_its_buckets(
    stepped: LogIndex, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    begin = 0 if axis == "step" else BEGIN
    for most, numbers in ((3, [*range(5, 26)]), (2, [8, 10, 14, 18, 20, 24])):
        monkeypatch.setattr(series, "DETAIL_CHUNKS", most)
        found = chart(stepped, tap_of(stepped, "loss"), 100, begin + 5, begin + 25, axis)  # of three chunks
        assert found["x"] == [begin + number for number in numbers]
        assert found["exact"] == (most == 3)


def test_a_chart_with_as_many_buckets_as_points_has_no_single_messages(stepped: LogIndex) -> None:
    tap = tap_of(stepped, "loss")
    assert chart(stepped, tap, 3, 0, 8, "step")["x"] == [0, 4, 8]
    assert not chart(stepped, tap, 3, 0, 8, "step")["exact"]
    assert not chart(stepped, tap, 4, 0, 8, "step")["exact"]  # nine messages are more than four points
    assert chart(stepped, tap, 9, 0, 8, "step")["exact"]


def test_a_chart_whose_log_was_deleted_keeps_its_buckets(stepped: LogIndex, tmp_path: Path) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    found = chart(stepped, tap_of(stepped, "loss"), 100, 4, 12, "step")
    assert (found["x"], found["exact"]) == ([4, 8, 10], False)
    assert any("No such file" in problem for problem in stepped.files.problems)


def test_few_messages_without_a_step_are_left_out_of_a_chart_by_step(tmp_path: Path) -> None:
    with log_in(tmp_path) as log:
        for launch in range(42):
            frames = [frame(NORM, np.float32(launch), seq=2 * launch, run_id=launch + 1)]
            if launch not in (20, 21):
                frames.append(
                    frame(LOSS, np.float32(0), np.int32(launch), seq=2 * launch + 1, run_id=launch + 1)
                )
            log.append("cpu:0", block_of(*frames), at_once=True)
    index = indexed(tmp_path)
    tap = tap_of(index, "norm")
    found = chart(index, tap, 100, None, None, None)
    assert (tap.without_step, tap.count, found["axis"]) == (2, 42, "step")
    assert found["x"] == [step for step in range(42) if step not in (20, 21)]
