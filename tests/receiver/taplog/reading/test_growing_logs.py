"""Logs that grow while they are followed: the messages that each look at them finds."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.errors import NotATapLogError
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Damage, Lost
from hostcallback.receiver.taplog.reading.follow import AT_ONCE, Follower, Found
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import BEGIN_NS, DESCRIBED, NORM, SECOND, block_of, frame, losses

PARTS = replace(NORM, name="parts", consumer_id=501, shards="some")


def segment(folder: Path, number: int = 1, **info: Any) -> SegmentWriter:
    """A new segment of a log, of the process with that number."""
    folder.mkdir(exist_ok=True)
    path = folder / f"20261122T2015{number:02d}.000000-4711-000001.hcblog"
    return SegmentWriter(path, info={"process": f"{number:016d}", "created_ns": number, "run": "one", **info})


def write(writer: SegmentWriter, block: FrameBlock, device: str = "cpu:0", steps: Any = None) -> None:
    """Appends messages."""
    writer.frames(device, block, {**DESCRIBED, PARTS.consumer_id: PARTS}, steps=steps)


def numbers(found: Iterable[Found]) -> list[int]:
    """The sequence numbers of messages; a note of lost messages has that of the first one, damage -1."""
    return [
        item.message.seq
        if isinstance(item, LoggedMessage)
        else item.lost.first_seq
        if isinstance(item, LostNote)
        else -1
        for item in found
    ]


def test_each_poll_has_what_came_since_the_last_one(tmp_path: Path) -> None:
    writer = segment(tmp_path)
    write(writer, losses(0, 2))
    follower = Follower([tmp_path], Selection(), wait=False)
    assert numbers(follower.poll()) == [0, 1]
    assert numbers(follower.poll()) == []
    write(writer, losses(2, 2))
    assert numbers(follower.poll()) == [2, 3]
    write(writer, losses(4, 1))
    writer.close()
    later = segment(tmp_path, 2)
    write(later, losses(7, 1))
    assert numbers(follower.poll()) == [4, 7]
    later.close()
    assert numbers(follower.poll()) == []
    assert {writer.process for writer in follower.writers} == {f"{number:016d}" for number in (1, 2)}


def test_the_messages_of_a_poll_are_sorted_by_time_in_portions(tmp_path: Path) -> None:
    writer = segment(tmp_path)
    for seq in range(AT_ONCE + 2, 0, -1):  # of as many devices, which came in this order
        write(writer, losses(seq, 1), f"cpu:{seq}")
    writer.close()
    found = numbers(Follower([tmp_path], Selection(), wait=False).poll())
    assert found == [*range(3, AT_ONCE + 3), 1, 2]


def test_notes_of_lost_messages_are_in_their_place(tmp_path: Path) -> None:
    writer = segment(tmp_path)
    write(writer, losses(0, 4))
    writer.lost(Lost("cpu:0", 50, 60, 11, 0, BEGIN_NS + 2 * SECOND + 1, "the ring was full"))
    writer.close()
    follower = Follower([tmp_path], Selection(), wait=False)
    assert numbers(follower.poll()) == [0, 1, 2, 50, 3]


def test_the_last_messages_come_without_the_earlier_ones(tmp_path: Path) -> None:
    writer = segment(tmp_path)
    for seq in range(6):
        write(writer, losses(seq, 1), f"cpu:{seq % 2}")
    follower = Follower([tmp_path], Selection(), wait=False)
    assert numbers(follower.last(3)) == [3, 4, 5]
    write(writer, losses(6, 1))
    writer.close()
    assert numbers(follower.poll()) == [6]


def test_a_damaged_part_is_reported_once(tmp_path: Path) -> None:
    writer = segment(tmp_path)
    write(writer, losses(0, 2))
    begins = writer.nbytes
    write(writer, losses(2, 2))
    write(writer, losses(4, 2))
    path = writer.path
    data = bytearray(path.read_bytes())
    data[begins] ^= 255  # the second part's header
    path.write_bytes(data)
    follower = Follower([tmp_path], Selection(), wait=False)
    found = list(follower.poll())
    assert sorted(numbers(found)) == [-1, 0, 1, 4, 5]
    (damage,) = [item for item in found if isinstance(item, Damage)]
    assert (damage.path, damage.torn) == (path, False)
    assert numbers(follower.poll()) == []
    assert numbers(Follower([tmp_path], Selection(), wait=False).last(3)) == [-1, 1, 4, 5]


@pytest.mark.parametrize("cut", [1, 60, 150, 400])
def test_a_part_that_is_half_written_comes_when_it_is_whole(tmp_path: Path, cut: int) -> None:
    writer = segment(tmp_path / "whole")
    write(writer, losses(0, 2))
    write(writer, losses(2, 2))
    data = writer.path.read_bytes()
    writer.close()
    log = tmp_path / "log"
    log.mkdir()
    path = log / writer.path.name
    path.write_bytes(data[:-cut])
    follower = Follower([log], Selection(), wait=False)
    assert numbers(follower.poll()) == [0, 1]
    assert numbers(follower.poll()) == []
    path.write_bytes(data)
    assert numbers(follower.poll()) == [2, 3]


def test_a_log_that_does_not_exist_yet_can_be_waited_for(tmp_path: Path) -> None:
    with pytest.raises(NotATapLogError, match="this folder has no tap log"):
        Follower([tmp_path], Selection(), wait=False)
    with pytest.raises(FileNotFoundError):
        Follower([tmp_path / "gone"], Selection(), wait=True)
    follower = Follower([tmp_path], Selection(), wait=True)
    assert numbers(follower.poll()) == []
    write(segment(tmp_path), losses(0, 2))
    assert numbers(follower.poll()) == [0, 1]
    shutil.rmtree(tmp_path)
    assert numbers(follower.poll()) == []


def test_a_segment_is_followed_once_its_header_is_whole(tmp_path: Path) -> None:
    writer = segment(tmp_path / "whole")
    write(writer, losses(0, 2))
    data = writer.path.read_bytes()
    log = tmp_path / "log"
    log.mkdir()
    path = log / writer.path.name
    path.write_bytes(data[:20])
    with pytest.raises(NotATapLogError, match="this tap log ends before its header does"):
        Follower([log], Selection(), wait=False)
    follower = Follower([log], Selection(), wait=True)
    assert numbers(follower.poll()) == []
    path.write_bytes(data)
    assert numbers(follower.poll()) == [0, 1]


def test_a_file_that_is_no_log_is_refused_first_and_reported_once_later(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write(segment(log), losses(0, 1))
    follower = Follower([log], Selection(), wait=False)
    stray = log / "20271122T201501.000000-4711-000001.hcblog"
    stray.write_bytes(b"no log" * 100)
    found = list(follower.poll())
    assert numbers(found) == [-1, 0]
    assert isinstance(found[0], Damage)
    assert found[0][:4] == (stray, 0, 0, -1)
    assert not found[0].torn
    assert str(stray) in found[0].reason
    assert numbers(follower.poll()) == []
    with pytest.raises(NotATapLogError, match=stray.name):
        Follower([log], Selection(), wait=True)


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        (Selection(names=("norm",)), [2, 3]),
        (Selection(devices=("cpu:1",)), [2, 3]),
        (Selection(first_step=1), [1]),
        (Selection(since_ns=BEGIN_NS + 3 * SECOND), [3]),
        (Selection(until_ns=BEGIN_NS + 2 * SECOND), [0, 1]),
        (Selection(names=("nothing",)), []),
    ],
)
def test_only_selected_messages_are_followed(tmp_path: Path, selection: Selection, wanted: list[int]) -> None:
    writer = segment(tmp_path)
    write(writer, losses(0, 2), steps=np.arange(2))
    write(writer, block_of(*(frame(NORM, np.float32(1), seq=seq) for seq in (2, 3))), "cpu:1")
    assert numbers(Follower([tmp_path], selection, wait=False).poll()) == wanted
    assert numbers(Follower([tmp_path], selection, wait=False).last(9)) == wanted


def part(device: int, seq: int, devices: int) -> FrameBlock:
    """One device's part of a value of the tap PARTS, of a program of several processes."""
    record = shard_record([((2 * devices,), (2 * device,))], shards=devices, group=0, partition=device)
    return block_of(frame(PARTS, np.int64([*record, 0, 0, 0]), np.arange(2.0) + 2 * device, seq=seq))


def test_a_value_of_two_processes_is_one_message_when_both_have_sent(tmp_path: Path) -> None:
    writers = [segment(tmp_path, 1 + k, job="job-1", process_index=k) for k in range(2)]
    write(writers[0], part(0, 0, 2))
    follower = Follower([tmp_path], Selection(), wait=False)
    apart = Follower([tmp_path], Selection(), wait=False, shards=True)
    assert numbers(follower.poll()) == []
    assert numbers(apart.poll()) == [0]
    write(writers[1], part(1, 5, 2))
    (whole,) = follower.poll()
    assert isinstance(whole, LoggedMessage)
    assert whole.value.tolist() == [0, 1, 2, 3]
    assert numbers(apart.poll()) == [5]
    assert [item.value.tolist() for item in Follower([tmp_path], Selection(), wait=False).last(4)] == [
        [0, 1, 2, 3]
    ]
    only = Follower([tmp_path], Selection(devices=("cpu:0",)), wait=False)
    assert sorted(numbers(only.poll())) == [0, 5]
