"""64 processes at a time, and kills on both sides: what is stored is in order, once, and all of who was not killed."""

from __future__ import annotations

import random
import subprocess
import threading
from pathlib import Path

import pytest

from checkout import REMOTE_HELPERS, python_path
from collecting import CollectorProcess, all_stored, wait_for
from python_process import start_python

PROGRAM = REMOTE_HELPERS / "many_clients_program.py"
CLIENTS, HOSTS, MESSAGES, KILLED = 64, 8, 3_000, 16


def start(address: str, folder: Path, number: int) -> subprocess.Popen[str]:
    """A client, whose host has one spool for its processes."""
    spool = folder / f"spool{number % HOSTS}"
    arguments = [address, spool, str(number), "1", str(MESSAGES)]
    options = {"stdout": None, "stderr": subprocess.PIPE, "PYTHONPATH": python_path(REMOTE_HELPERS)}
    return start_python(PROGRAM, *arguments, **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_processes_and_their_collector_are_killed_at_random(tmp_path: Path) -> None:
    chance, pause = random.Random(64), threading.Event()
    with CollectorProcess(tmp_path, "--quiet") as collector:
        clients = {number: start(collector.address, tmp_path, number) for number in range(CLIENTS)}
        run = collector.log / "run"
        for turn in range(1, 5):
            wait_for(lambda least=8 * turn: len(list(run.glob("*"))) >= least, "streams of the clients", 200)
            for number in chance.sample(sorted(clients)[: 12 * turn], KILLED // 4):
                victim = clients.pop(number)
                victim.kill()
                victim.communicate()
            if turn in (2, 3):
                collector.kill()
                pause.wait(chance.uniform(0.0, 1.0))
                collector.start()
        # Later processes of the same hosts send what the killed ones left.
        later = [start(collector.address, tmp_path, CLIENTS + host) for host in range(HOSTS)]
        errors = [client.communicate(timeout=400)[1] for client in (*clients.values(), *later)]
        assert [client.returncode for client in (*clients.values(), *later)] == [0] * len(errors), errors
        assert not [left for host in range(HOSTS) for left in (tmp_path / f"spool{host}").iterdir()]
        assert collector.stop() == 0
    found = all_stored(collector.log)
    counts = {}
    for (process, _), seqs in found.items():
        assert seqs == list(range(len(seqs))), process
        counts[process] = len(seqs)
    whole = [count for count in counts.values() if count == MESSAGES]
    print(f"{len(counts)} processes stored, {len(whole)} of them with all messages")
    assert len(whole) >= CLIENTS - KILLED + HOSTS
