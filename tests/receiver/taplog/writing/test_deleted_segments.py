"""A log that deletes its old segments always has the newest messages, and is read meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.tap_stats import gather
from logged_frames import log_in, losses, read, seqs


@pytest.mark.parametrize("rotations", [1, 2])
def test_a_log_is_read_while_its_oldest_segments_are_deleted(tmp_path: Path, rotations: int) -> None:
    with log_in(tmp_path, segment_bytes=20_000, keep_bytes=100_000) as log:
        first = 0

        def write_segments(count: int) -> None:
            nonlocal first
            seen = before = set(tmp_path.iterdir())
            while len(seen - before) < count:
                log.append("cpu:0", losses(first, 50), at_once=True)
                first += 50
                seen = seen | set(tmp_path.iterdir())

        write_segments(8)
        for use in (
            lambda reader: seqs([*reader.messages()]),
            lambda reader: [chunk for _, segment in reader.segments() for chunk in segment.chunks()],
            lambda reader: reader.tap_names(),
            lambda reader: gather(reader.message_runs(), Selection()).taps,
        ):
            reader = LogReader(tmp_path)
            before = set(tmp_path.iterdir())
            write_segments(rotations)
            assert before - set(tmp_path.iterdir())
            assert use(reader)
        reader = LogReader(tmp_path)
        write_segments(rotations)
        found = seqs([*reader.messages()])
        assert found == list(range(found[0], found[-1] + 1))  # and it raises nothing


def test_the_last_complete_segment_stays_however_large_it_is(tmp_path: Path) -> None:
    with log_in(tmp_path, segment_bytes=1_000, keep_bytes=2_000) as log:
        for first in range(0, 500, 50):
            log.append("cpu:0", losses(first, 50), at_once=True)
            assert seqs(read(tmp_path)[0])[-1] == first + 49


def test_segments_that_are_deleted_while_a_log_is_opened_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostcallback.receiver.taplog.format import layout

    with log_in(tmp_path, segment_bytes=1) as log:
        for first in range(4):
            log.append("cpu:0", losses(first, 1), at_once=True)
    listed = sorted(tmp_path.iterdir())
    monkeypatch.setattr(layout, "segments_of", lambda path: listed)
    listed[0].unlink()
    assert seqs(read(tmp_path)[0]) == [1, 2, 3]
    for path in listed[1:]:
        path.unlink()
    with pytest.raises(FileNotFoundError):
        LogReader(tmp_path)
