"""The files of a flight recorder: the rings of devices in them, and what they hold when a process dies."""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import pytest

from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.taplog.flight.recorder import (
    BLOCK_BYTES,
    PROCESS_FILE,
    TAPS_FILE,
    FlightRecorder,
    RingContents,
    RingFileError,
    file_name,
    read_ring,
)
from hostcallback.receiver.taplog.flight.recovery import Flight, find_flights, write_log
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.wire.frame import HEADER, Flags
from logged_frames import LOSS, NORM, consumer_of, read

pytestmark = pytest.mark.native_only

CAPACITY = 4096
MESSAGES = 5
DEVICES = itertools.count(2_000_000)
EXTERNAL_BYTES = 600


def ring_in(path: Path, nbytes: int = 8, *, room: int = 1 << 20) -> RingSource:
    """A ring in a file, with some messages of `nbytes` bytes, of which those of more than 512 are outside the ring."""
    config = RingConfig(capacity_bytes=CAPACITY, external_threshold_bytes=512, block_budget_bytes=1 << 20)
    source = RingSource.open(next(DEVICES), config)
    source.keep_in_file(path, "cpu:0", room)
    library = native.load()
    assert library.hcb_test_produce(library.hcb_ring_get(source.device), 1, MESSAGES, nbytes) == MESSAGES
    return source


def changed(path: Path, change: Callable[[bytearray], None]) -> RingContents:
    """What a copy of a ring's file holds after a change: the process still uses the file itself."""
    data = bytearray(path.read_bytes())
    change(data)
    copy = path.with_name("copy.hcbring")
    copy.write_bytes(data)
    return read_ring(copy)


def seqs(contents: RingContents) -> list[int]:
    """The sequence numbers of the messages."""
    return [message.header.seq for message in contents.frames]


@pytest.mark.parametrize(
    ("at", "value"), [(8, 2), (0, 0x55), (16, CAPACITY + 8), (16, 0), (12, 200), (12, 4100)]
)
def test_a_first_page_that_is_none_is_refused(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "cpu-0.hcbring"
    ring_in(path)

    def change(data: bytearray) -> None:
        data[at : at + 4] = value.to_bytes(4, "little")

    said = {
        8: "has version 2, this package reads version 1: upgrade",
        0: r"starts with b'U\\x00\\x00\\x00ING\\n', exp",
    }
    with pytest.raises(
        RingFileError, match=said.get(at, r"states a ring of \d+ bytes from \d+ on: its first page is")
    ):
        changed(path, change)


def test_a_message_that_was_taken_is_delivered_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu-0.hcbring"
    source = ring_in(path)
    starts = [message.header.position for message in read_ring(path).frames]

    def deliver(released: int, delivered: int) -> list[bool]:
        def change(data: bytearray) -> None:
            data[192:208] = released.to_bytes(8, "little") + delivered.to_bytes(8, "little")

        return [message.delivered for message in changed(path, change).frames]

    assert deliver(starts[4], starts[2]) == deliver(starts[2], starts[4]) == [True, True, False, False, False]
    assert source.capacity_bytes == CAPACITY


def test_payloads_outside_the_ring_are_put_into_their_messages(tmp_path: Path) -> None:
    ring_in(tmp_path / "cpu-0.hcbring", EXTERNAL_BYTES)
    ring_in(tmp_path / "cpu-1.hcbring", 500)
    outside, inside = (read_ring(tmp_path / f"cpu-{k}.hcbring") for k in range(2))
    assert (len(outside.frames), outside.without_payload) == (MESSAGES, 0)
    for large, small in zip(outside.frames, inside.frames, strict=True):
        start = large.header.payload_start
        assert large.frame[HEADER.size : start + 500] == small.frame[HEADER.size : start + 500]
        assert len(large.frame) == start + 640
        assert not any(large.frame[start + EXTERNAL_BYTES :])
        kept = large.header._replace(flags=large.header.flags & ~Flags.EXTERNAL)
        assert large.frame[: HEADER.size] == HEADER.pack(b"HCB", 1, *kept)
        assert large.header.flags & Flags.EXTERNAL


@pytest.mark.parametrize("part", ["no record", "size", "end", "magic", "position", "size in the record"])
def test_a_message_whose_payload_is_gone_is_counted(tmp_path: Path, part: str) -> None:
    path = tmp_path / "cpu-0.hcbring"
    ring_in(path, EXTERNAL_BYTES)
    page = int.from_bytes(path.read_bytes()[12:16], "little")
    header = read_ring(path).frames[1].header

    def change(data: bytearray) -> None:
        words = page + header.position + header.payload_start  # address, bytes, place of the record
        record = int.from_bytes(data[words + 16 : words + 24], "little")
        end = len(data) - 128 - EXTERNAL_BYTES + 1  # a byte too far
        data[end : end + 24] = data[record : record + 24]
        for at, value in {
            "no record": [(words + 16, 0)],
            "size": [(words + 8, EXTERNAL_BYTES - 1), (record + 16, EXTERNAL_BYTES - 1)],
            "end": [(words + 16, end)],
            "magic": [(record, 0x55)],
            "position": [(record + 8, header.position + 128)],
            "size in the record": [(record + 16, EXTERNAL_BYTES + 1)],
        }[part]:
            data[at : at + 8] = value.to_bytes(8, "little")

    found = changed(path, change)
    assert found.without_payload == 1
    assert [bool(message.frame) for message in found.frames] == [True, False, True, True, True]
    log = write_log(Flight(tmp_path, {}, [found]), tmp_path / "log").parent
    (note,) = read(log)[1]
    assert note.lost[:5] == ("cpu:0", 1, 1, 1, EXTERNAL_BYTES)
    assert note.lost[5:] == (header.time_ns, "its arrays were not in the ring's file")


def test_a_payload_at_the_end_of_the_file_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "cpu-0.hcbring"
    ring_in(path, EXTERNAL_BYTES)
    page = int.from_bytes(path.read_bytes()[12:16], "little")
    last = read_ring(path).frames[-1]

    def change(data: bytearray) -> None:
        words = page + last.header.position + last.header.payload_start
        record = int.from_bytes(data[words + 16 : words + 24], "little")
        place = len(data) - 128 - EXTERNAL_BYTES
        data[place:] = data[record : record + 128 + EXTERNAL_BYTES]
        data[words + 16 : words + 24] = place.to_bytes(8, "little")

    found = changed(path, change)
    assert found.frames[-1].frame == last.frame
    assert found.without_payload == 0


@pytest.mark.parametrize(("at", "value"), [(56, 1 << 20), (44, 1 << 20), (48, 1 << 20), (3, 99)])
def test_a_header_that_does_not_fit_its_place_is_damage(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "cpu-0.hcbring"
    ring_in(path)
    page = int.from_bytes(path.read_bytes()[12:16], "little")
    whole = read_ring(path)
    starts = [message.header.position for message in whole.frames]

    def change(data: bytearray) -> None:  # the place of the frame, its lengths, or the version
        data[page + starts[1] + at : page + starts[1] + at + 4] = value.to_bytes(4, "little")

    found = changed(path, change)
    assert seqs(found) == [0, 2, 3, 4]
    assert found.damaged == [(starts[1], starts[2])]


class WrittenMeanwhile(PosixPath):
    """The file of a process that goes on: it writes up to `head` after its ring was read."""

    head = 0

    def open(self, *arguments: Any, **options: Any) -> Any:
        with super().open("r+b") as file:
            file.seek(128)
            file.write(self.head.to_bytes(8, "little"))
        return super().open(*arguments, **options)


@pytest.mark.parametrize(("newer", "left"), [(0, [0, 1, 2, 3, 4]), (1, [2, 3, 4]), (MESSAGES, [])])
def test_messages_that_may_have_been_overwritten_meanwhile_are_left_out(
    tmp_path: Path, newer: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_in(tmp_path / "cpu-0.hcbring")
    copy = shutil.copy(tmp_path / "cpu-0.hcbring", tmp_path / "copy.hcbring")
    whole = read_ring(tmp_path / "cpu-0.hcbring")
    position = whole.frames[newer].header.position if newer < MESSAGES else whole.head
    monkeypatch.setattr(WrittenMeanwhile, "head", CAPACITY + position if newer else whole.head)
    assert seqs(read_ring(WrittenMeanwhile(copy))) == left


def recorded(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far."""
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def test_a_ring_is_kept_once_and_removed_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path / "all" / "flights")
    source = RingSource.open(next(DEVICES), RingConfig(capacity_bytes=CAPACITY))
    for _ in range(2):
        recorder.keep("cpu:0/1", source)
    assert sorted(path.name for path in recorder.folder.iterdir()) == [
        "cpu-0-1.hcbring",
        PROCESS_FILE,
        TAPS_FILE,
    ]
    path = recorder.folder / file_name("cpu:0/1")
    assert path.stat().st_size >= BLOCK_BYTES + CAPACITY
    assert read_ring(path).name == "cpu:0/1"
    assert not recorded(caplog)
    told = json.loads((recorder.folder / PROCESS_FILE).read_text())
    assert (told["host"], told["pid"], told["python"]) == (
        platform.node(),
        os.getpid(),
        platform.python_version(),
    )
    assert recorder.folder.name == f"{platform.node()}-{os.getpid()}-{told['started_ns'] // 1000}"
    assert recorder.folder.stat().st_mode & 0o777 == 0o700
    pid = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: pid + 1)
        recorder.remove()
    assert path.exists()
    recorder.remove()
    assert not recorder.folder.exists()
    assert recorder.folder.parent.exists()


def test_a_device_without_a_ring_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.keep("cpu:3", QueueSource(3))
    assert recorded(caplog) == [
        "the flight recorder does not record cpu:3: it needs the native transport, and has Python callbacks"
    ]
    assert not list(recorder.folder.glob("*.hcbring"))
    recorder.remove()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "its file needs 33 MiB, and the file system is full: make room, or name another folder",
        ),
        (
            errno.EDQUOT,
            "its file needs 33 MiB, and the file system is full: make room, or name another folder",
        ),
        (
            errno.EBUSY,
            "is pinned once the ring is used: set HOSTCALLBACK_FLIGHT_RECORDER before the first tap",
        ),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_a_ring_that_cannot_be_kept_is_said_with_its_cure(
    tmp_path: Path, number: int, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(tmp_path)
    source = RingSource.open(next(DEVICES), RingConfig(capacity_bytes=1 << 20))

    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(source, "keep_in_file", fail)
    recorder.keep("gpu:1", source)
    (told,) = recorded(caplog)
    assert told.startswith("the flight recorder does not record gpu:1: ")
    assert told.endswith(said)
    recorder.remove()


def test_taps_are_described_in_the_files_and_a_failure_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(tmp_path)

    def failing(error: Exception) -> Consumer:
        def describe() -> Any:
            raise error

        return replace(consumer_of(LOSS), describe=describe)

    recorder.describe(replace(consumer_of(LOSS), describe=None))
    recorder.describe(failing(ValueError("no plain data")))
    assert not recorded(caplog)
    for _ in range(2):
        recorder.describe(failing(OSError(errno.ENOSPC, "full")))
    for tap in (LOSS, NORM, LOSS):
        recorder.describe(consumer_of(tap))
    assert recorded(caplog) == [
        f"the flight recorder cannot write {recorder.folder / TAPS_FILE}: [Errno 28] full"
    ]
    reader = SegmentReader(recorder.folder / TAPS_FILE)
    assert not list(reader.chunks())  # descriptors are no chunks of their own
    assert [described for _, described in reader.consumers.values()] == [LOSS, NORM]
    reader.close()
    recorder.remove()


def test_a_running_process_is_found_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "3"])
    recorder = FlightRecorder(tmp_path)
    ring_in(recorder.folder / "cpu-0.hcbring")
    (flight,) = find_flights(tmp_path)
    assert flight.is_running
    assert flight.title.startswith(f"{platform.node()}:{os.getpid()} ")
    assert "train.py --steps 3 (started 2" in flight.title
    assert f", still running, run {flight.run})" in flight.title
    assert (len(flight.rings), flight.problems) == (1, [])
    recorder.remove()
