"""A collector with hundreds of streams."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import REMOTE_HELPERS, python_path
from collecting import CollectorProcess, all_stored, wait_for

PROGRAM = REMOTE_HELPERS / "many_clients_program.py"
EACH, MESSAGES, KILLS = 60, 200, 2  # kills of the collector


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hundreds_of_processes_are_stored_once_and_in_order(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))  # fewer than the collector will need
    try:
        collector = CollectorProcess(tmp_path, "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with collector:
        processes = [
            subprocess.Popen(
                [
                    sys.executable, PROGRAM, collector.address, tmp_path / f"spool{number}", str(number * EACH),
                    str(EACH), str(MESSAGES),
                ],
                env={**os.environ, "PYTHONPATH": python_path(REMOTE_HELPERS)},
                stderr=subprocess.PIPE, text=True,
            )
            for number in range(4)
        ]  # fmt: skip
        run = collector.log / "run"
        for turn in range(1, KILLS + 1):
            wait_for(lambda least=60 * turn: len(list(run.glob("*"))) >= least, "some of the streams")
            collector.kill()
            collector.start()
        errors = [process.communicate(timeout=200)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, errors
        assert collector.stop() == 0
    found = all_stored(collector.log)
    assert len(found) == 4 * EACH
    assert all(seqs == list(range(MESSAGES)) for seqs in found.values())
