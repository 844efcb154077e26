"""Spooled data is sent soon: at once after a pause and when a caller waits, otherwise many writes together."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from collecting import CollectorProcess, Emitter, forwarder, only, stored, wait_for
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.spool import spool as pace
from hostcallback.receiver.remote.spool.spool import SEND_BYTES, SendPolicy, Spool
from hostcallback.receiver.taplog.writing.recorder import Recorder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a pace sees."""
    now = [100.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_first_bytes_after_a_pause_are_sent_at_once(clock: list[float]) -> None:
    mine = SendPolicy()
    assert mine.wrote(1)
    assert mine.wait_sec(1, acked=True) == 0.0


def test_little_waits_until_the_last_piece_is_long_ago(clock: list[float]) -> None:
    mine = SendPolicy()
    mine.sends(everything=True)
    mine.has_nothing()
    assert mine.wrote(100)  # the sender must look how long this write may wait
    assert mine.wait_sec(100, acked=True) == pytest.approx(pace.SEND_SEC)
    assert not mine.wrote(100)
    clock[0] += pace.SEND_SEC
    assert mine.wait_sec(200, acked=True) == 0.0


def test_little_waits_longer_while_the_last_piece_is_not_acknowledged(clock: list[float]) -> None:
    mine = SendPolicy()
    mine.sends(everything=True)
    clock[0] += pace.SEND_SEC
    assert mine.wait_sec(1, acked=True) == 0.0
    assert mine.wait_sec(1, acked=False) == pytest.approx(pace.BUSY_SEC - pace.SEND_SEC)
    clock[0] += pace.BUSY_SEC
    assert mine.wait_sec(1, acked=False) == 0.0


def test_large_and_urgent_data_is_sent_at_once(clock: list[float]) -> None:
    mine = SendPolicy()
    mine.sends(everything=True)
    assert mine.wait_sec(SEND_BYTES, acked=False) == 0.0
    assert mine.wrote(SEND_BYTES)
    mine.sends(everything=True)
    mine.hurry()
    assert mine.wait_sec(1, acked=True) == 0.0
    mine.sends(everything=False)
    assert mine.wait_sec(1, acked=True) == 0.0
    mine.sends(everything=True)
    assert mine.wait_sec(1, acked=True) > 0.0


def test_a_sender_waits_for_the_next_bytes_no_longer_than_its_timeout(tmp_path: Path) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r"))
    recorder = Recorder(spool.log)
    Emitter(recorder).losses(3)
    recorder.flush()
    piece = spool.read(StreamOffset(1, 0), 60.0)
    assert piece is not None
    found: list[SegmentSlice | None] = []
    waiting = threading.Thread(target=lambda: found.append(spool.read(piece.end, 0.02)), daemon=True)
    waiting.start()
    waiting.join(20)
    assert found == [None]
    recorder.close()
    spool.folder.remove()


@pytest.mark.slow
def test_many_small_writes_are_sent_in_few_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[SegmentSlice] = []
    read = Spool.read

    def noted(self: Spool, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        piece = read(self, position, timeout_sec)
        if piece is not None:
            pieces.append(piece)
        return piece

    monkeypatch.setattr(Spool, "read", noted)
    with CollectorProcess(tmp_path, "--quiet") as collector:
        began = time.monotonic()
        recorder = forwarder(collector.address, tmp_path / "spool")
        emitter = Emitter(recorder)
        for count in range(100):
            emitter.losses(1)
            wait_for(lambda count=count: recorder.counters.messages > count, "it in the spool")
        assert recorder.drain(60)
        seconds = time.monotonic() - began
        recorder.close()
        assert list(only(stored(collector.log)[0])) == list(range(100))
    assert len(pieces) <= seconds / pace.SEND_SEC + 5  # the first one, that of the drain, and the trailer
