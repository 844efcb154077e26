"""A log whose file or folder is deleted by others goes on, and notes what it lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hostcallback.receiver.taplog.format.layout import ThinnedTap
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.writing import log_writer
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import log_in, losses, read, seqs

ALWAYS, NEVER = 0.0, 1e9
"""Seconds between two looks."""


def look_each(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SEC", seconds)


def write_seen(log: LogWriter, first: int, count: int) -> None:
    """Has messages written, and the file looked at."""
    log.append("cpu:0", losses(first, count), at_once=True)
    log.flush(look=True)


def delete(folder: Path, what: str = "file") -> None:
    for path in folder.iterdir():
        path.unlink()
    if what == "folder":
        folder.rmdir()


def notes_of(folder: Path) -> list[tuple[str, int, int, int, str]]:
    lost = [note.lost for note in read(folder)[1]]
    return sorted((one.device, one.first_seq, one.last_seq, one.messages, one.reason) for one in lost)


REASON = "the log could not be written: its file was deleted"


def test_messages_after_the_folder_was_deleted_are_lost_until_it_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look_each(monkeypatch, ALWAYS)
    folder = tmp_path / "log"
    with log_in(folder) as log:
        write_seen(log, 0, 50)
        delete(folder, "folder")
        log.append("cpu:0", losses(50, 7), at_once=True)
        counters = log.counters
        assert (counters.messages, counters.lost_messages, counters.unnoted_messages) == (50, 7, 7)
        assert counters.failure == "No such file or directory"
        log.flush()
        assert log.counters.unnoted_messages == 7
        folder.mkdir()
        log.flush()
        log.append("cpu:0", losses(57, 5), at_once=True)
    assert log.counters.unnoted_messages == 0
    assert caplog.text.count("messages cannot be recorded (No such file or directory)") == 1
    assert caplog.text.count("recording works again") == 1
    messages, (note,), damaged = read(folder)
    assert (seqs(messages), damaged) == ([57, 58, 59, 60, 61], [])
    assert (note.lost.messages, note.lost.first_seq, note.lost.last_seq) == (7, 50, 56)


def test_the_next_segment_begins_at_once_if_only_the_file_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look_each(monkeypatch, ALWAYS)
    with log_in(tmp_path) as log:
        write_seen(log, 0, 50)
        delete(tmp_path)
        log.append("cpu:0", losses(50, 7), at_once=True)
        log.append("cpu:0", losses(57, 5), at_once=True)
        counters = log.counters
        assert (counters.messages, counters.lost_messages, counters.failure) == (62, 0, "")
    messages, notes, damaged = read(tmp_path)
    assert (seqs(messages), notes, damaged) == ([*range(50, 62)], [], [])
    assert not caplog.records


def next_write(log: LogWriter) -> None:
    log._look_at = 0.0  # as if the time were over
    log.append("cpu:0", losses(80, 5), at_once=True)


def rotation(log: LogWriter) -> None:
    log.append("cpu:2", losses(0, 500), at_once=True)


def flush(log: LogWriter) -> None:
    log.flush(look=True)


@pytest.mark.parametrize("find", [next_write, rotation, flush, LogWriter.close])
def test_what_was_written_since_the_last_look_is_lost_with_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    find: Callable[[LogWriter], None],
) -> None:
    look_each(monkeypatch, NEVER)
    with log_in(tmp_path, segment_bytes=50_000) as log:
        write_seen(log, 0, 50)
        log.append("cpu:0", losses(50, 7), at_once=True)
        delete(tmp_path)
        log.append("cpu:0", losses(57, 5), at_once=True)
        log.append("cpu:1", losses(0, 3), at_once=True)
        assert (log.counters.messages, log.counters.lost_messages) == (65, 0)
        find(log)
        more = 500 if find is rotation else 0
        counters = log.counters
        assert counters.messages == (55 if find is next_write else 50)
        assert counters.lost_messages == 15 + more
        assert (counters.lost_by_device["cpu:0"], counters.lost_by_device["cpu:1"]) == (12, 3)
        assert counters.failure == "its file was deleted"
        log.append("cpu:0", losses(90, 2), at_once=True)
    assert log.counters.unnoted_messages == 0
    expected = [("cpu:0", 50, 61, 12, REASON), ("cpu:1", 0, 2, 3, REASON)]
    assert notes_of(tmp_path) == expected + ([("cpu:2", 0, 499, 500, REASON)] if more else [])
    assert seqs(read(tmp_path)[0])[-2:] == [90, 91]
    assert caplog.text.count("messages cannot be recorded (its file was deleted)") == 1
    assert caplog.text.count("recording works again") == 1


def test_a_failed_write_does_not_hide_what_was_lost_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    look_each(monkeypatch, NEVER)
    with log_in(tmp_path) as log:
        write_seen(log, 0, 50)
        log.append("cpu:0", losses(50, 7), at_once=True)
        delete(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "frames", full)
            log.append("cpu:0", losses(57, 5), at_once=True)
        assert (log.counters.messages, log.counters.lost_messages) == (50, 12)
    full_disk = "the log could not be written: No space left on device"
    assert notes_of(tmp_path) == [("cpu:0", 50, 56, 7, REASON), ("cpu:0", 57, 61, 5, full_disk)]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_notes_in_a_deleted_file_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    look_each(monkeypatch, NEVER)
    folder, told = tmp_path / "log", {"tap": "loss"}
    with log_in(folder) as log:
        write_seen(log, 0, 50)
        log.lose("cpu:0", 50, 54, 5, "dropped: no room")
        log.note_rules([ThinnedTap("loss", "every 2", 3)])
        delete(folder, what)
        log.note_exceptions([told])
        log.lose("cpu:0", 55, 59, 5, "dropped: no room")
        log.flush(look=True)
        if what == "folder":
            assert log.counters.unnoted_messages == 10
            folder.mkdir()
            log.flush()
        counters = log.counters
        assert (counters.unnoted_messages, counters.lost_messages, counters.messages) == (0, 0, 50)
    assert notes_of(folder) == [("cpu:0", 50, 59, 10, "dropped: no room")]
    reader = LogReader(folder)
    assert reader.thinned() == {"loss": ThinnedTap("loss", "every 2", 3)}
    assert [*reader.exceptions().values()] == [[told]]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_note_that_comes_after_the_deletion_is_in_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    look_each(monkeypatch, ALWAYS)
    folder = tmp_path / "log"
    with log_in(folder) as log:
        write_seen(log, 0, 50)
        delete(folder, what)
        log.lose("cpu:0", 50, 59, 10, "dropped: no room")
        log.flush()
        assert log.counters.unnoted_messages == (10 if what == "folder" else 0)
        assert log.counters.failure == ("No such file or directory" if what == "folder" else "")
        folder.mkdir(exist_ok=True)
        log.flush()
        assert notes_of(folder) == [("cpu:0", 50, 59, 10, "dropped: no room")]


def test_a_note_that_went_to_a_deleted_file_is_in_the_next_one_after_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_each(monkeypatch, NEVER)
    with log_in(tmp_path) as log:
        write_seen(log, 0, 50)
        delete(tmp_path)
        log.lose("cpu:0", 50, 59, 10, "dropped: no room")
        log.flush()
    assert log.counters.unnoted_messages == 0
    assert notes_of(tmp_path) == [("cpu:0", 50, 59, 10, "dropped: no room")]


def test_the_file_is_not_looked_at_for_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_each(monkeypatch, NEVER)
    looks = 0
    fstat = os.fstat

    def counted(fd: int) -> os.stat_result:
        nonlocal looks
        found = fstat(fd)
        looks += found.st_ino == inode
        return found

    with log_in(tmp_path) as log:
        write_seen(log, 0, 5)
        inode = next(tmp_path.iterdir()).stat().st_ino
        monkeypatch.setattr(os, "fstat", counted)
        for first in range(5, 505, 5):
            log.append("cpu:0", losses(first, 5), at_once=True)
        monkeypatch.undo()
    assert looks == 0


def without_links(found: os.stat_result) -> os.stat_result:
    return os.stat_result((*found[:3], 0, *found[4:]))


def test_a_file_system_may_count_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_each(monkeypatch, ALWAYS)
    fstat = os.fstat
    with log_in(tmp_path) as log:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda fd: without_links(fstat(fd)))
            for first in range(0, 50, 5):
                log.append("cpu:0", losses(first, 5), at_once=True)
            log.flush(look=True)
    assert (log.counters.messages, log.counters.lost_messages, log.counters.failure) == (50, 0, "")
    assert seqs(read(tmp_path)[0]) == [*range(50)]
    assert len([*tmp_path.iterdir()]) == 1


def test_another_file_in_its_place_does_not_hide_that_a_file_was_deleted(tmp_path: Path) -> None:
    segment = SegmentWriter(tmp_path / "one.hcblog")
    assert not segment.is_deleted
    segment.path.unlink()
    assert segment.is_deleted
    segment.path.write_bytes(b"")
    assert segment.is_deleted
    segment.abandon()


@pytest.mark.parametrize(
    ("number", "is_deleted"), [(errno.ESTALE, True), (errno.EACCES, False), (errno.EIO, False)]
)
def test_only_errors_that_say_so_mean_that_a_file_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_deleted: bool
) -> None:
    def fails(fd: int) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    segment = SegmentWriter(tmp_path / "one.hcblog")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fails)
        assert segment.is_deleted == is_deleted
    segment.abandon()


def test_a_deleted_segment_takes_no_room_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_each(monkeypatch, ALWAYS)
    with log_in(tmp_path, segment_bytes=20_000, keep_bytes=100_000) as log:
        first = 0
        while len([*tmp_path.iterdir()]) < 4:
            log.append("cpu:0", losses(first, 20), at_once=True)
            first += 20
        oldest = min(tmp_path.iterdir())
        for _ in range(8):
            log.append("cpu:0", losses(first, 50), at_once=True)
            first += 50
            max(tmp_path.iterdir()).unlink()
        log.append("cpu:0", losses(first, 1), at_once=True)
        assert oldest.exists()
        assert log.counters.nbytes > 120_000  # so that there was no room if the deleted ones took some
