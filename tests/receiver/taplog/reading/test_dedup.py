"""Messages in several logs are read once."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.reading.reader import STREAM, LogReader, SequenceRanges
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, LOSS, NORM, block_of, frame, losses, read


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True).map(sorted), max_size=12))
def test_numbers_are_new_once(runs: list[list[int]]) -> None:
    numbers, known = SequenceRanges(), set[int]()
    for run in runs:
        new = numbers.add(np.array(run, np.uint64))
        assert new.tolist() == [number not in known for number in run]
        known.update(run)


def test_many_gaps_take_bounded_memory() -> None:
    numbers = SequenceRanges(max_ranges=8)
    for number in range(0, 200, 2):
        assert numbers.add(np.array([number], np.uint64)).all()
        assert not numbers.add(np.array([number], np.uint64)).any()
    assert len(numbers._starts) <= 8


def collected(folder: Path, writer: str, *blocks: object, lost: Lost | None = None) -> None:
    """The log of a collector that stored messages of another process."""
    folder.mkdir(exist_ok=True)
    info = {"process": writer, STREAM: "0123456789abcdef", "host": "vm", "pid": 7}
    segment = SegmentWriter(folder / f"p000000-{writer}-000001.hcblog", info=info)
    for block in blocks:
        segment.frames("cpu:0", block, DESCRIBED)  # type: ignore[arg-type]
    if lost is not None:
        segment.lost(lost)
    segment.close()


def test_messages_two_collectors_stored_are_read_once_and_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    lost = Lost("cpu:0", 90, 99, 10, 640, 5, "it was too long")
    collected(a, "a" * 16, losses(0, 20), losses(40, 10), lost=lost)
    collected(b, "b" * 16, losses(15, 20), losses(38, 20), lost=lost)
    messages, notes, damaged = read(a, b)
    assert [item.message.seq for item in messages] == [*range(35), *range(38, 58)]
    assert [item.lost for item in notes] == [lost]
    assert not damaged
    found = [item.message.seq for item in LogReader([a, b]).messages(Selection(names=("lo*",)))]
    assert found == [*range(35), *range(38, 58)]
    assert main(["stats", "--json", str(a), str(b)]) == 0
    assert '"messages": 55' in capsys.readouterr().out


def test_messages_of_other_taps_between_are_not_copies(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    collected(a, "a" * 16, losses(0, 10).taken_out(np.arange(10) % 2 == 0))
    collected(b, "b" * 16, block_of(*(frame(NORM, np.float32(k), seq=k) for k in range(1, 10, 2))))
    found = [(item.message.seq, item.message.consumer.name) for item in LogReader([a, b]).messages()]
    assert found == [(k, NORM.name if k % 2 else LOSS.name) for k in range(10)]


def test_a_log_that_was_copied_as_it_grew_is_read_once(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    segment = SegmentWriter(a / "one.hcblog")
    segment.frames("cpu:0", losses(0, 10), DESCRIBED)
    shutil.copytree(a, b)
    segment.frames("cpu:0", losses(10, 10), DESCRIBED)
    segment.close()
    for paths in ([a, b], [b, a]):
        assert [item.message.seq for item in LogReader(paths).messages()] == list(range(20))


def test_one_log_is_read_as_it_is(tmp_path: Path) -> None:
    segment = SegmentWriter(tmp_path / "one.hcblog")
    segment.frames("cpu:0", losses(0, 5), DESCRIBED)
    segment.frames("cpu:0", losses(0, 5), DESCRIBED)
    segment.close()
    assert [item.message.seq for item in LogReader(tmp_path).messages()] == [*range(5), *range(5)]
