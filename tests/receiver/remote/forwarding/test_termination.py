"""SIGTERM: the process forwards its messages first, and then the previous handler runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from collecting import CollectorProcess, all_stored, only
from ports import free_port
from python_process import run_python

PROGRAM = Path(__file__).with_name("terminated_program.py")
COUNT = 200_000

pytestmark = pytest.mark.native_only


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("how", "alive"),
    [("default", False), ("forked", False), ("handled", True), ("replaced", True), ("distributed", True)],
)
def test_everything_that_was_emitted_arrives(tmp_path: Path, how: str, alive: bool) -> None:
    with CollectorProcess(tmp_path, "--quiet") as collector:
        arguments = [collector.address, tmp_path / "spool", how, str(COUNT), str(free_port())]
        ended = run_python(PROGRAM, *arguments, timeout_sec=110)
        assert ended.returncode == (-signal.SIGKILL if alive else -signal.SIGTERM), ended.stderr
        assert ("alive" in ended.stdout) is alive
        collector.stop()
    assert only(all_stored(collector.log)) == list(range(COUNT))
