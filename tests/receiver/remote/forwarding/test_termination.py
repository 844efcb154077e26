"""SIGTERM: the process forwards its messages first, and then the previous handler runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collecting import CollectorProcess, only, stored
from ports import free_port

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
        ended = subprocess.run(
            [sys.executable, PROGRAM, collector.address, tmp_path / "spool", how, str(COUNT), str(free_port())],
            env=dict(os.environ), capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert ended.returncode == (-signal.SIGKILL if alive else -signal.SIGTERM), ended.stderr
        assert ("alive" in ended.stdout) is alive
        collector.stop()
    found, lost = stored(collector.log)
    assert only(found) == list(range(COUNT))
    assert not lost
