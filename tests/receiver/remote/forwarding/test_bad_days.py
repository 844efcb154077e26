"""Collectors that stall or have a full disk, and processes whose clocks are wrong."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from collecting import LOSS, CollectorProcess, Emitter, all_stored, forwarder, only, stored, wait_for
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import files_no_longer_than

pytestmark = pytest.mark.slow


def test_a_stalled_collector_gets_everything_when_it_goes_on(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        recorder = forwarder(collector.address, tmp_path / "spool", window_bytes=1 << 16, drain_sec=90)
        emitter = Emitter(recorder)
        emitter.losses(10)
        assert recorder.drain(60)
        collector.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(20):
            emitter.losses(200)
            recorder.flush()
        assert time.monotonic() - began < 30  # emitting does not wait for it
        assert recorder.unsent_bytes > 4_000 * 128
        collector.process.send_signal(signal.SIGCONT)
        recorder.close()
        assert not recorder.unsent_bytes
        collector.stop()
    assert only(all_stored(collector.log)) == list(range(4_010))


def test_a_full_disk_at_the_collector_loses_nothing(tmp_path: Path) -> None:
    limit = 300_000
    with CollectorProcess(tmp_path, "--quiet") as collector:
        resource.prlimit(collector.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        recorder = forwarder(collector.address, tmp_path / "spool", drain_sec=90)
        emitter = Emitter(recorder)
        for _ in range(40):
            emitter.losses(100)
            recorder.flush()
        wait_for(lambda: any("cannot store" in line for line in collector.errors), "a full disk")
        assert recorder.unsent_bytes
        assert not recorder.refused
        collector.stop()
        collector.start()  # the disk has room again
        recorder.close()
        assert not recorder.unsent_bytes
        collector.stop()
    assert only(all_stored(collector.log)) == list(range(4_000))


def test_a_full_disk_at_the_process_is_counted_and_noted(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        recorder = forwarder(collector.address, tmp_path / "spool", drain_sec=60)
        emitter = Emitter(recorder)
        emitter.losses(100)
        recorder.flush()
        with files_no_longer_than(50_000):
            emitter.losses(1_000)
            recorder.flush()
        assert recorder.counters.lost_messages
        recorder.close()
        collector.stop()
    found, lost = stored(collector.log)
    seqs = only(found)
    assert seqs == sorted(set(seqs))
    assert len(seqs) + sum(note.messages for note in lost) == emitter.seq
    assert any("File too large" in note.reason for note in lost)


@pytest.mark.parametrize("hours", [-30, 30])
def test_clocks_that_are_wrong_change_no_order(
    tmp_path: Path, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with forwarder(collector.address, tmp_path / "spool", drain_sec=60) as recorder:
            emitter = Emitter(recorder)
            emitter.losses(50)
            recorder.flush()
            monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3_600 * 10**9)
            emitter.losses(50)
            monkeypatch.undo()
            emitter.losses(50)
        collector.stop()
    assert only(all_stored(collector.log)) == list(range(150))


def test_rates_are_kept_to(tmp_path: Path) -> None:
    with CollectorProcess(tmp_path, "--quiet", "--max-rate", "400000") as collector:
        with forwarder(collector.address, tmp_path / "spool", drain_sec=60, window_bytes=1 << 16) as recorder:
            emitter = Emitter(recorder)
            emitter.emit(LOSS, np.zeros(1_200_000, np.uint8), np.int32(0))
            began = time.monotonic()
            assert recorder.drain(60)
            assert time.monotonic() - began > 1.0
        collector.stop()
    assert os.path.getsize(next((collector.log / "run").iterdir())) > 1_200_000
    assert [item.value["loss"].nbytes for item in LogReader(collector.log / "run").messages()] == [1_200_000]
