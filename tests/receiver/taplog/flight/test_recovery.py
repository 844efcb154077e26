"""The log that recovery makes of the files of a process that died."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.taplog.flight.recorder import TAPS_FILE, RecoveredFrame, RingContents, read_ring
from hostcallback.receiver.taplog.flight.recovery import Flight, write_log
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import MAGIC, Flags, decode_header
from logged_frames import LOSS, NORM, frame, read


def flight_of(folder: Path, *frames: bytes) -> Flight:
    """A process that has described its taps, and died with these messages in a ring."""
    folder.mkdir()
    taps = SegmentWriter(folder / TAPS_FILE)
    for described in (LOSS, NORM):
        taps.describe(described)
    taps.close()
    kept = [RecoveredFrame(decode_header(one), one, delivered=False) for one in frames]
    return Flight(folder, {}, [RingContents(folder / "cpu_0.hcbring", "cpu:0", 0, kept)])


def test_a_message_before_the_step_of_its_launch_has_that_step(tmp_path: Path) -> None:
    flight = flight_of(
        tmp_path / "flight",
        frame(NORM, np.float32(0.5), seq=0),
        frame(LOSS, np.float32(1), np.int32(7), seq=1),
    )
    write_log(flight, tmp_path / "log")
    messages, _, damaged = read(tmp_path / "log")
    assert [(message.tap.consumer.name, message.step) for message in messages] == [("norm", 7), ("loss", 7)]
    assert not damaged
    assert not flight.problems


def test_messages_of_taps_whose_descriptors_cannot_be_read_are_recovered_and_it_is_said(
    tmp_path: Path,
) -> None:
    flight = flight_of(tmp_path / "flight", frame(LOSS, np.float32(1), np.int32(7), seq=3))
    (flight.folder / TAPS_FILE).write_bytes(b"no log")
    write_log(flight, tmp_path / "log")
    assert [message.message.seq for message in read(tmp_path / "log")[0]] == [3]
    (told,) = flight.problems
    assert told.startswith("the taps' descriptors cannot be read: ")


@pytest.mark.native_only
def test_messages_that_are_unfinished_or_damaged_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "cpu_0.hcbring"
    source = RingSource.open(1_000_000 - 1, RingConfig(capacity_bytes=4096))
    source.keep_in_file(path, "cpu:0", 1 << 20)
    library = native.load()
    assert library.hcb_test_produce(library.hcb_ring_get(source.device), 1, 5, 8) == 5
    whole = read_ring(path)
    starts = [one.header.position for one in whole.frames]
    assert (len(starts), whole.unfinished, whole.damaged) == (5, 0, [])
    data = bytearray(path.read_bytes())
    ring = data.index(whole.frames[0].frame) - starts[0]
    flags = ring + starts[1] + len(MAGIC) + 1
    data[flags : flags + 4] = (whole.frames[1].header.flags | Flags.BUSY).to_bytes(4, "little")
    damaged = ring + starts[3]
    data[damaged : damaged + len(MAGIC)] = b"XYZ"
    copy = tmp_path / "copy.hcbring"  # this process still uses the file itself
    copy.write_bytes(data)
    found = read_ring(copy)
    assert [one.header.position for one in found.frames] == [starts[0], starts[2], starts[4]]
    assert (found.unfinished, found.damaged) == (1, [(starts[3], starts[4])])
