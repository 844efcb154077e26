"""A stored stream of many devices or taps, or of segments of several processes, is read within limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver import limits
from hostcallback.receiver.remote.forwarding_protocol import StreamOffset
from hostcallback.receiver.remote.spool.stream_reader import StoredRuns
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, LOSS, block_of, frame, losses

Segments = Callable[[int], Path]


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    return lambda number: tmp_path / f"{number:06d}.taps"


def write(path_of: Segments, number: int, *devices: str, **options: Any) -> None:
    """Writes a segment with one message of each of these devices."""
    writer = SegmentWriter(path_of(number), number=number, **options)
    for device in devices:
        writer.frames(device, losses(number, 1), DESCRIBED)
    writer.close()


def test_messages_of_further_devices_than_are_kept_are_left_out(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DEVICES", 3)
    write(segments, 1, "cpu:0", "cpu:1")
    write(segments, 2, "cpu:2", "cpu:3", "cpu:1")
    write(segments, 3, "cpu:4", "cpu:3", "cpu:2")
    records = [
        *StoredRuns(segments, StreamOffset(1, 0), lambda described: True).read(StreamOffset(4, 0), 1e9)
    ]
    assert [record.device if isinstance(record, Stretch) else "left out" for record in records] == [
        "cpu:0", "cpu:1", "cpu:2", "left out", "cpu:1", "left out", "left out", "cpu:2"
    ]  # fmt: skip
    damage = [str(record) for record in records if isinstance(record, Damage)]
    assert all("of more than 3 devices in one stream" in text for text in damage)


def test_damage_in_a_chunk_is_told_of_before_its_intact_messages(segments: Segments) -> None:
    write(segments, 1, "cpu:0")
    writer = SegmentWriter(segments(2), number=2)
    writer.frames("cpu:0", losses(1, 1000), DESCRIBED)
    writer.close()
    stored = bytearray(segments(2).read_bytes())
    stored[len(stored) // 2] ^= 1
    segments(2).write_bytes(stored)
    runs = StoredRuns(segments, StreamOffset(1, 0), lambda described: True)
    whole, damage, intact = runs.read(StreamOffset(3, 0), 1e9)
    assert isinstance(damage, Damage)
    assert (damage.path, damage.reason) == (segments(2), "checksums do not match")
    assert isinstance(whole, Stretch)
    assert isinstance(intact, Stretch)
    assert 0 < damage.messages == 1000 - len(intact.block) < 1000


def test_further_taps_than_are_kept_are_told_of_once(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "DESCRIPTIONS", 2)
    for number in range(1, 5):
        writer = SegmentWriter(segments(number), number=number)
        tap = replace(LOSS, consumer_id=number, name=f"tap {number}")
        message = frame(tap, np.float32(1), np.int32(1), seq=number)
        writer.frames("cpu:0", block_of(message), {tap.consumer_id: tap})
        writer.close()
    runs = StoredRuns(segments, StreamOffset(1, 0), lambda described: True)
    told = []
    with caplog.at_level(logging.WARNING):
        for record in runs.read(StreamOffset(5, 0), 1e9):
            assert isinstance(record, Stretch)
            told.append((int(record.block.seqs[0]), len(caplog.messages)))
    assert told == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert "000003.taps: a process has described more than 2 taps: the messages of the others" in caplog.text


def test_a_segment_of_another_process_is_left_out(
    segments: Segments, caplog: pytest.LogCaptureFixture
) -> None:
    for number, host in ((1, "one"), (2, "two"), (3, "one")):
        write(segments, number, "cpu:0", info={"host": host})
    runs = StoredRuns(segments, StreamOffset(1, 0), lambda described: True)
    with caplog.at_level(logging.WARNING):
        records = [*runs.read(StreamOffset(4, 0), 1e9)]
    assert [int(record.block.seqs[0]) for record in records if isinstance(record, Stretch)] == [1, 3]
    (text,) = caplog.messages
    assert text.startswith("a segment is left out: ")
    assert text.endswith("000002.taps is of another process than the segments before it")
