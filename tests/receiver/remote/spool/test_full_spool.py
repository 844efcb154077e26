"""A spool that is full: the messages that each policy keeps, and the exact losses that the collector learns of."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collecting import LOSS, CollectorProcess, Emitter, all_stored, forwarder, only, stored, wait_for
from hostcallback.receiver.remote.forwarding_protocol import StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.spool.spool import Spool
from hostcallback.receiver.taplog.writing.recorder import Recorder
from logged_frames import DESCRIBED, losses, read, seqs

SPOOL_BYTES = 256 << 10
COUNT = 6_000  # of 192 bytes


def forward_without_and_with_collector(folder: Path, policy: str, **options: Any) -> tuple[Any, Any, Any]:
    """Emits while no collector runs, and a little more when one does; returns stored, lost, and the counters."""
    with CollectorProcess(folder, "--quiet") as collector:
        collector.kill()
        with forwarder(
            collector.address,
            folder / "spool",
            spool_bytes=SPOOL_BYTES,
            when_full=policy,
            drain_sec=60,
            **options,
        ) as recorder:
            emitter = Emitter(recorder)
            for _ in range(COUNT // 100):
                emitter.losses(100)
                recorder.flush()
                assert recorder.unsent_bytes <= SPOOL_BYTES * 1.2
            collector.start()
            assert recorder.drain(60)
            emitter.losses(10)
        counters = recorder.counters
        assert collector.stop() == 0
    found, lost = stored(collector.log)
    return only(found), lost, counters


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest", "sample"])
def test_dropped_messages_are_noted_where_the_rest_is_stored(tmp_path: Path, policy: str) -> None:
    found, lost, counters = forward_without_and_with_collector(tmp_path, policy)
    assert found == sorted(set(found))
    assert len(found) + sum(note.messages for note in lost) == COUNT + 10
    assert counters.lost_messages == COUNT + 10 - len(found) > 0
    missing = set(range(COUNT + 10)) - set(found)
    assert all(note.first_seq in missing and note.last_seq in missing for note in lost)
    assert missing == {
        seq for note in lost for seq in range(note.first_seq, note.last_seq + 1) if seq not in set(found)
    }
    assert set(range(COUNT, COUNT + 10)) <= set(found)
    kept_of_old = len([seq for seq in found if seq < COUNT // 4])
    if policy == "drop_oldest":
        assert set(range(COUNT - 200, COUNT)) <= set(found)
        assert any("oldest" in note.reason for note in lost)
    elif policy == "drop_newest":
        assert set(range(500)) <= set(found)
        assert kept_of_old > 500
        assert all("newest" in note.reason for note in lost)
    else:
        assert any("one message in 10" in note.reason for note in lost)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("drop_oldest", "the oldest messages were dropped"),
        ("drop_newest", "the newest messages were dropped"),
        ("sample", "one message in 10 was kept"),
    ],
)
def test_what_finds_no_room_without_a_collector_is_counted(tmp_path: Path, policy: Any, reason: str) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r", spool_bytes=1 << 17, when_full=policy))
    spool.log.describe(DESCRIBED[77])
    count, each = 1600, 20
    for first in range(0, count, each):
        # The first message of each block stands for 5 more, which were folded into it.
        spool.log.record("cpu:0", lambda room, first=first: (losses(first, each), [(first, 5)], True))
        assert spool.waiting_bytes <= 1 << 17
    counters = spool.log.counters
    assert not spool.is_sent()
    spool.log.close()
    messages, lost, damaged = read(spool.folder.path)
    number, path = spool.folder.segments()[-1]
    spool.acked(StreamOffset(number, path.stat().st_size))
    assert spool.is_sent()
    kept = seqs(messages)
    assert not damaged
    assert sum(message.folded for message in messages) == 5 * sum(seq % each == 0 for seq in kept)
    stored = len(kept) + sum(message.folded for message in messages)
    assert stored + counters.lost_messages == count + 5 * count // each
    assert 0 < stored < count
    assert (0 in kept) == (policy != "drop_oldest")
    assert (count - 1 in kept) == (policy == "drop_oldest")
    assert any(reason in note.lost.reason for note in lost)
    spool.folder.remove()


@pytest.mark.slow
def test_blocking_waits_for_room_and_loses_no_message(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        collector.kill()
        recorder = forwarder(collector.address, tmp_path / "spool", spool_bytes=SPOOL_BYTES, drain_sec=60)
        emitter = Emitter(recorder)
        thread = threading.Thread(target=emitter.losses, args=(COUNT,))
        thread.start()
        wait_for(lambda: recorder.unsent_bytes > SPOOL_BYTES * 0.6, "a full spool")
        held = wait_for(lambda: emitter.seq, "messages")
        thread.join(0.5)
        assert thread.is_alive()
        assert recorder.unsent_bytes <= SPOOL_BYTES
        assert held < COUNT
        collector.start()
        thread.join(60)
        assert not thread.is_alive()
        recorder.close()
        collector.stop()
    assert only(all_stored(collector.log)) == list(range(COUNT))


def test_a_device_begins_while_another_one_waits_for_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r", spool_bytes=1 << 16))
    recorder = Recorder(spool.log)
    waiting = Emitter(recorder, "cpu:0")
    waiting.emit(LOSS, np.zeros(60_000, np.uint8), np.int32(0))
    recorder.flush()
    waiting.emit(LOSS, np.zeros(4_000, np.uint8), np.int32(1))
    wait_for(lambda: "is full" in caplog.text, "the log's timer to wait")
    Emitter(recorder, "cpu:1").losses(1)
    number, path = spool.folder.segments()[-1]
    spool.acked(StreamOffset(number, path.stat().st_size))
    wait_for(lambda: recorder.counters.messages == 3, "all messages in the spool")
    recorder.close()
    spool.folder.remove()


@pytest.mark.slow
def test_one_message_larger_than_the_spool_is_forwarded(tmp_path: Path) -> None:
    big = np.arange(3 << 20, dtype=np.uint8)
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with forwarder(
            collector.address, tmp_path / "spool", spool_bytes=SPOOL_BYTES, drain_sec=60
        ) as recorder:
            emitter = Emitter(recorder)
            emitter.losses(3)
            emitter.emit(LOSS, big, np.int32(3))
            emitter.losses(3)
        assert collector.stop() == 0
    assert only(all_stored(collector.log)) == list(range(7))
