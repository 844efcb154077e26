"""Clocks that differ by hours, at the collector and at the processes: no decision depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import REMOTE_HELPERS, python_path
from collecting import CollectorProcess, all_stored
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import python_output

PROGRAM = REMOTE_HELPERS / "many_clients_program.py"
HOUR = 3_600

SHIFT = """
import os, time
shift = int(os.environ["CLOCK_IS_OFF"])
now, now_ns = time.time, time.time_ns
time.time = lambda: now() + shift
time.time_ns = lambda: now_ns() + shift * 10**9
"""


@pytest.fixture
def paths(tmp_path: Path) -> str:
    """PYTHONPATH of the module that sets a process's clock."""
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "sitecustomize.py").write_text(SHIFT)
    return python_path(tmp_path / "off", REMOTE_HELPERS)


@pytest.mark.slow
def test_processes_and_collectors_with_other_clocks_store_and_print_once(
    tmp_path: Path, paths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("CLOCK_IS_OFF", str(-40 * HOUR))
    with CollectorProcess(tmp_path, "--print-all") as collector:

        def run(first: int, hours: int) -> None:
            arguments = map(str, (collector.address, tmp_path / "spool", first, 2, 50))
            python_output(PROGRAM, *arguments, CLOCK_IS_OFF=str(hours * HOUR))

        run(0, 5)
        run(2, -5)
        assert collector.stop() == 0
        monkeypatch.setenv("CLOCK_IS_OFF", str(40 * HOUR))  # and once more, with another one
        collector.start()
        run(4, 0)
        assert collector.stop() == 0
    assert list(all_stored(collector.log).values()) == [list(range(50))] * 6
    times = [item.message.time_ns for item in LogReader(collector.log / "run").messages()]
    assert max(times) - min(times) > 9 * HOUR * 10**9
    for number in range(6):
        lines = [line for line in collector.lines if line.startswith(f"[p{number} d0 ")]
        assert [line.split()[3] for line in lines] == [str(step) for step in range(50)]
