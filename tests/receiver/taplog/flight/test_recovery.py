"""The log that recovery makes of the files of a process that died."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hostcallback.receiver.taplog.flight.recorder import TAPS_FILE, RecoveredFrame, RingContents
from hostcallback.receiver.taplog.flight.recovery import Flight, write_log
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import decode_header
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
