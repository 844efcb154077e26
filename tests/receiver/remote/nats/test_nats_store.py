"""Storing of fetched messages: each message once, those of a device in order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import START
from hostcallback.receiver.remote.nats.collector import NatsStore
from hostcallback.receiver.remote.nats.publication import Publication, publications_of
from hostcallback.receiver.remote.nats.transport import NatsStream
from hostcallback.receiver.taplog.format.layout import NO_STEP, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader, Writer
from logged_frames import DESCRIBED, LOSS, NORM, block_of as block_of_frames, frame
from published_units import KEY, block_of, units


def parts(first: int, stop: int) -> list[Publication]:
    """The units of messages of one device with these numbers."""
    return units(block_of([3] * stop).part(first, stop))


def stored(store: Store) -> list[int]:
    return [
        record.message.seq
        for record in LogReader(store.folder("run")).records()
        if hasattr(record, "message")
    ]


def test_messages_under_several_subjects_are_joined_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path)
    nats_store = NatsStore(store)
    nats_store.append(list(reversed(parts(0, 20))))
    nats_store.append(parts(20, 30))
    assert stored(store) == list(range(30))
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert all(nats_store.has(unit, again=False) for unit in parts(20, 30))
    assert not any(nats_store.has(unit, again=True) for unit in parts(30, 40))
    nats_store.close()
    store.close()


def test_messages_know_the_step_before_them(tmp_path: Path) -> None:
    store = Store(tmp_path)
    nats_store = NatsStore(store)
    nats_store.append(parts(0, 20))  # of steps 0 to 19
    nats_store.append([replace(unit, steps=np.full_like(unit.steps, NO_STEP)) for unit in parts(20, 30)])
    nats_store.append([replace(unit, steps=unit.steps + 40) for unit in parts(30, 40)])
    nats_store.close()
    store.close()
    (path,) = (tmp_path / "run").iterdir()
    chunks = [chunk for chunk in SegmentReader(path).chunks() if isinstance(chunk, Chunk)]
    assert [chunk.step_before for chunk in chunks if chunk.kind is Kind.FRAMES] == [NO_STEP, 19, 19]


def test_another_collector_in_its_place_knows_the_stored_messages(tmp_path: Path) -> None:
    for first in (0, 10):
        store = Store(tmp_path)
        nats_store = NatsStore(store)
        assert not first or all(nats_store.has(unit, again=True) for unit in parts(0, first))
        nats_store.append(parts(first, first + 10))
        store.close()  # the segment stays as it is: it was killed
    assert stored(store) == list(range(20))


def test_messages_that_come_late_are_read_in_their_place(tmp_path: Path) -> None:
    store = Store(tmp_path)
    nats_store = NatsStore(store)
    nats_store.append(parts(10, 20))
    (late, *others) = parts(0, 10)
    assert not nats_store.has(late, again=True)
    nats_store.append([late, *others])
    nats_store.append(parts(20, 30))
    nats_store.close()
    assert stored(store) == list(range(30))
    store.close()


@pytest.mark.parametrize("cut", [1, 64, 200, 700, 1500])
def test_a_half_written_message_is_stored_once_when_it_comes_again(tmp_path: Path, cut: int) -> None:
    store = Store(tmp_path)
    NatsStore(store).append(parts(0, 10))
    (path,) = (tmp_path / "run").iterdir()
    NatsStore(store).append(parts(10, 20))
    (path,) = set((tmp_path / "run").iterdir()) - {path}
    os.truncate(path, path.stat().st_size - cut)
    store.close()
    store = Store(tmp_path)
    third = NatsStore(store)
    assert all(third.has(unit, again=True) for unit in parts(0, 10))
    missing = [unit for unit in parts(10, 20) if not third.has(unit, again=True)]
    assert missing
    third.append(missing)
    third.close()
    assert sorted(stored(store)) == list(range(20))
    store.close()


@pytest.mark.parametrize("splits_launch", [False, True])
def test_a_collector_in_the_place_of_another_knows_the_beginning_of_a_launch(
    tmp_path: Path, splits_launch: bool
) -> None:
    # Launches of two messages each: a step, and a norm of the same step.
    frames = [
        frame(NORM, np.float32(seq), seq=seq, run_id=1 + seq // 2)
        if seq % 2
        else frame(LOSS, np.float32(seq), np.int32(seq // 2), seq=seq, run_id=1 + seq // 2)
        for seq in range(20)
    ]
    split = 9 if splits_launch else 10
    transport = NatsStream(SimpleNamespace(max_payload=1 << 20), tmp_path, KEY, START, print)  # type: ignore[arg-type]
    writer = Writer("p", "host", 7, 3)
    for part in (frames[:split], frames[split:]):
        block = block_of_frames(*part)
        run = Stretch(
            writer, "cpu:0", block, block.seqs.view(np.int64) // 2, 0, len(block), {}, DESCRIBED, tmp_path
        )
        published = publications_of(KEY, run, {}, 1 << 20, begins=transport._begins(run))
        store = Store(tmp_path / "log")
        nats_store = NatsStore(store)
        nats_store.append([Publication.decode(unit.encode()) for unit in published])
        nats_store.close()
        store.close()
    assert len(list((tmp_path / "log" / "run").iterdir())) == 2
    steps = {logged.message.seq: logged.step for logged in LogReader(tmp_path / "log" / "run").messages()}
    # Of a launch in two files, the second one has no step.
    assert steps == {seq: None if splits_launch and seq == 9 else seq // 2 for seq in range(20)}
