"""Processes that are killed while they forward: messages in their spools arrive, once, sent by the next process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkout import REMOTE_HELPERS, python_path
from collecting import CollectorProcess, Emitter, all_stored, forwarder, stored, wait_for
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, find_orphans
from ports import free_port

PROGRAM = Path(__file__).with_name("forwarding_program.py")
TURNS = 4


def run_and_kill(address: str, folder: Path, after_sec: float) -> int:
    """Starts the program and kills it; how many messages it had flushed for certain."""
    file = folder / "flushed"
    file.unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, PROGRAM, address, folder / "spool", file],
        env={**os.environ, "PYTHONPATH": python_path(REMOTE_HELPERS)},
    ) as process:
        wait_for(lambda: file.exists() and file.read_text(), "a program that emits")
        threading.Event().wait(after_sec)
        process.kill()
        process.wait(60)
    return int(file.read_text() or 0)


@pytest.mark.slow
def test_messages_in_the_spools_of_killed_processes_arrive_once(tmp_path: Path) -> None:
    chance = random.Random(3)
    spool = tmp_path / "spool"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        flushed = []
        for turn in range(TURNS):
            if turn == 1:
                collector.kill()  # no collector listens for these two
            if turn == 3:
                collector.start()
            flushed.append(run_and_kill(collector.address, tmp_path, chance.uniform(0.0, 0.3)))
        with forwarder(collector.address, spool, drain_sec=60) as recorder:
            Emitter(recorder).losses(1)
            wait_for(lambda: len(list(spool.iterdir())) == 1, "the spools of the dead to be sent")
        assert not list(spool.iterdir())
        collector.stop()
    found = all_stored(collector.log)
    assert len(found) == TURNS + 1
    counts = []
    for seqs in found.values():
        assert seqs == list(range(len(seqs)))  # once, in order, without gaps
        counts.append(len(seqs))
    assert counts.count(1) == 1
    counts.remove(1)
    # Every flushed message, and messages written after the last report.
    assert sum(counts) >= sum(flushed)
    assert all(any(count >= said for count in counts) for said in flushed)


def test_a_living_processes_spool_is_left_alone(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        with forwarder(collector.address, spool) as first, forwarder(collector.address, spool) as second:
            Emitter(first).losses(5)
            Emitter(second).losses(6)
        collector.stop()
    found, _ = stored(collector.log)
    assert sorted(map(len, found.values())) == [5, 6]


@pytest.mark.slow
def test_spools_of_another_run_are_left_alone(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        collector.kill()
        with forwarder(collector.address, spool, run="first", drain_sec=0) as recorder:
            Emitter(recorder).losses(5)
        collector.start()
        with forwarder(collector.address, spool, run="second", drain_sec=60) as recorder:
            Emitter(recorder).losses(6)
        assert [path.name.split("~")[0] for path in spool.iterdir()] == ["first"]
        collector.stop()
    found, _ = stored(collector.log, "second")
    assert [len(seqs) for seqs in found.values()] == [6]


@pytest.mark.slow
def test_a_process_that_ends_at_once_sends_all_that_others_left(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with CollectorProcess(tmp_path, "--quiet") as collector:
        collector.kill()
        left = [forwarder(collector.address, spool, drain_sec=0) for _ in range(8)]
        for count, recorder in enumerate(left):
            Emitter(recorder).losses(100 + count)
        for recorder in left:
            recorder.close()
        (damaged, *_) = spool.iterdir()
        (damaged / "000001.hcblog").unlink()
        (damaged / "000001.hcblog").symlink_to("nowhere")
        collector.start()
        with forwarder(collector.address, spool, drain_sec=60):
            pass
        assert list(spool.iterdir()) == [damaged]
        collector.stop()
    found = all_stored(collector.log)
    assert len(found) == 7
    assert all(seqs == list(range(len(seqs))) for seqs in found.values())


def test_a_process_that_cannot_send_what_others_left_leaves_it_to_the_next_one(tmp_path: Path) -> None:
    address = f"localhost:{free_port()}"  # where nothing listens
    for count in range(1, 4):
        with forwarder(address, tmp_path, drain_sec=0) as recorder:
            Emitter(recorder).losses(count)
            assert find_orphans(tmp_path, "run") == []  # its own, and those that it has taken
    folders = find_orphans(tmp_path, "run")
    try:
        left = sorted(OrphanSpool(folder).key.epoch for folder in folders)
    finally:
        for folder in folders:
            folder.release()
    assert len(set(left)) == 3
