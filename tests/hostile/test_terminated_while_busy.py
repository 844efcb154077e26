"""SIGTERM at awkward moments: log and spool have all messages, and the process ends."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from checkout import python_path
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import run_python

pytestmark = pytest.mark.native_only

PROGRAM = Path(__file__).with_name("terminated_while_busy.py")


def run(moment: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end."""
    options = {"PYTHONPATH": python_path(), "HOSTCALLBACK_CONTROL_SOCKET": "0"}
    return run_python("-W", "ignore", PROGRAM, moment, folder, timeout_sec=60, **options)


def numbers(folder: Path) -> list[int]:
    """The numbers in the log or spool below a folder, in its order."""
    records = LogReader(sorted(folder.rglob("*.hcblog"))).records()
    return [int(record.message.arrays[0]) for record in records if isinstance(record, LoggedMessage)]


@pytest.mark.slow
def test_what_is_emitted_while_sigterm_flushes_is_in_the_log_and_in_the_spool(tmp_path: Path) -> None:
    ended = run("flushing", tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    emitted = int((tmp_path / "emitted").read_text())
    assert emitted == 900
    assert numbers(tmp_path / "log") == list(range(emitted)), ended.stderr
    assert numbers(tmp_path / "spool") == list(range(emitted)), ended.stderr
    assert "no space left" in ended.stderr


@pytest.mark.slow
def test_sigterm_ends_a_process_that_python_is_ending(tmp_path: Path) -> None:
    ended = run("ending", tmp_path)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert not (tmp_path / "went on").exists()
    assert numbers(tmp_path / "log") == list(range(300))
