"""The threads that share a spool: devices that write, and the sender, which reads and is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from collecting import LOSS, Emitter, wait_for
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.spool.spool import Spool
from hostcallback.receiver.taplog.writing.recorder import Recorder
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter

SPOOL_BYTES = 1 << 16


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Forward("localhost:7070", spool=tmp_path, run="r", spool_bytes=SPOOL_BYTES))
    yield made
    made.log.close()
    made.folder.remove()


@pytest.fixture
def emit(spool: Spool) -> Callable[[str, int], None]:
    """Emits an array of some bytes on a device, and writes it."""
    recorder = Recorder(spool.log)

    def emit(device: str, nbytes: int) -> None:
        Emitter(recorder, device).emit(LOSS, np.zeros(nbytes, np.uint8), np.int32(0))
        recorder.flush()

    return emit


def acknowledge_all(spool: Spool) -> None:
    number, path = spool.folder.segments()[-1]
    spool.acked(StreamOffset(number, path.stat().st_size))


def test_the_sender_reads_and_is_answered_while_a_device_writes(
    spool: Spool, emit: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    emit("cpu:0", 1_000)
    begun, goes_on, frames = threading.Event(), threading.Event(), SegmentWriter.frames

    def slow(self: SegmentWriter, *given: object, **named: object) -> None:
        begun.set()
        assert goes_on.wait(60)
        frames(self, *given, **named)

    def send() -> SegmentSlice | None:
        piece = spool.read(StreamOffset(1, 0), 1.0)
        if piece is not None:
            spool.acked(piece.end)
        return piece

    with ThreadPoolExecutor(2) as pool:
        try:
            monkeypatch.setattr(SegmentWriter, "frames", slow)
            writing = pool.submit(emit, "cpu:1", 2_000)
            assert begun.wait(60)
            piece = pool.submit(send).result(20)
            assert piece is not None
            assert len(piece.data) > 1_000
            assert pool.submit(spool.is_sent).result(20)
            assert not writing.done()
        finally:
            goes_on.set()
        writing.result(60)
    assert not spool.is_sent()
    assert spool.waiting_bytes > 2_000


def test_devices_that_wait_for_room_take_it_one_at_a_time(
    spool: Spool, emit: Callable[[str, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    emit("cpu:0", 60_000)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(emit, device, 40_000) for device in ("cpu:1", "cpu:2")]
        wait_for(lambda: caplog.text.count("is full") >= 2, "both devices to wait")
        try:
            began = time.process_time()
            threading.Event().wait(0.3)
            assert time.process_time() - began < 0.15, "they wake each other"
            for written in (2, 3):
                acknowledge_all(spool)
                wait_for(
                    lambda written=written: spool.log.counters.messages == written, "a message in the spool"
                )
                assert 40_000 < spool.waiting_bytes <= SPOOL_BYTES
        finally:
            spool.log.close()  # ends the waits
        for each in waiting:
            each.result(60)


def test_a_log_that_is_closed_writes_the_message_that_waits_for_room(
    spool: Spool, emit: Callable[[str, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    emit("cpu:0", 60_000)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(emit, "cpu:1", 40_000)
        wait_for(lambda: "is full" in caplog.text, "the device to wait")
        spool.log.close()
        waiting.result(60)
    assert spool.log.counters.messages == 2
    assert spool.waiting_bytes > 100_000
