"""A failure on one process of a program ends all of them, with its reason."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from hostcallback.lifecycle.job import pause_sec
from python_process import start_python

PROGRAM = Path(__file__).with_name("job_program.py")

WITHIN_SEC = 5.0


class Ended(NamedTuple):
    """How one process ended."""

    status: int
    at: float
    output: str

    def said(self, word: str) -> list[str]:
        """The words behind `word` on the line that begins with it; none without such a line."""
        found = re.search(rf"^{word} (.*)$", self.output, re.MULTILINE)
        return found[1].split(" ", 2) if found else []


def run_job(processes: int, how: str, bad: int) -> list[Ended]:
    """Runs the program in several processes until all have ended."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    one_device = "--xla_force_host_platform_device_count=1"
    commands = [[PROGRAM, str(n), port, str(processes), how, str(bad)] for n in range(processes)]
    started = [start_python(*each, stderr=subprocess.STDOUT, XLA_FLAGS=one_device) for each in commands]
    ends: dict[int, float] = {}
    until = time.time() + 90
    try:
        while len(ends) < processes and time.time() < until:
            for n, process in enumerate(started):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.02)
                    ends.setdefault(n, time.time())
    finally:
        for process in started:
            process.kill()
    outputs = [process.communicate()[0] for process in started]
    assert len(ends) == processes, outputs
    return [Ended(p.returncode, ends[n], outputs[n]) for n, p in enumerate(started)]


@pytest.mark.parametrize(
    ("processes", "seconds"), [(2, 0.5), (250, 0.5), (500, 1.0), (1000, 2.0), (9000, 2.0)]
)
def test_the_coordinator_is_asked_often_by_few_processes_and_seldom_by_many(
    processes: int, seconds: float
) -> None:
    assert pause_sec(processes) == seconds


@pytest.mark.slow_variants
@pytest.mark.parametrize(("processes", "bad"), [(2, 1), (4, 2)])
def test_a_failed_check_is_raised_by_all_processes_with_its_process_and_line(
    processes: int, bad: int
) -> None:
    found = run_job(processes, "check", bad)
    assert [each.status for each in found] == [1] * processes, "\n".join(each.output for each in found)
    failed_at = float(found[bad].said("fails")[0])
    assert "CheckError: x is 100.0" in found[bad].output
    for each in found[:bad] + found[bad + 1 :]:
        at, process, line = each.said("raised")
        assert float(at) - failed_at < WITHIN_SEC, each.output
        assert int(process) == bad
        assert "job_program.py:" in line
        assert "(each.<locals>.body)" in line


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_that_waits_for_one_that_failed_and_lives_is_ended_with_the_reason(processes: int) -> None:
    # The first process has JAX's coordinator, so it lives until the others have ended, and these wait in a collective
    # for it, from which Python cannot come back.
    first, *others = run_job(processes, "check", 0)
    assert [each.status for each in (first, *others)] == [1] * processes, (first, others)
    failed_at = float(first.said("fails")[0])
    for each in others:
        assert "process 0 of this program failed, at " in each.output
        assert "job_program.py:" in each.output
        assert "check failed: x is 100.0" in each.output
        # Of several that wait, a collective may fail when another one has ended: then it has come back.
        comes_back = processes > 2 and bool(each.said("raised"))
        assert comes_back or "the main thread does not come back from " in each.output, each.output
        assert each.at - failed_at < 15, each.output


@pytest.mark.slow
def test_an_exception_that_ends_a_process_ends_the_others() -> None:
    first, second = run_job(2, "exception", 1)
    assert (first.status, second.status) == (1, 1), (first, second)
    assert "ValueError: no data" in first.output
    assert first.said("raised")[1] == "1"
    assert re.fullmatch(r"job_program.py:\d+ \(<module>\)", first.said("raised")[2])


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_others_do_not_wait_for_it() -> None:
    found = run_job(4, "killed", 2)
    assert found[2].status == -9
    failed_at = float(found[2].said("fails")[0])
    for each in found[:2] + found[3:]:
        assert each.status == 1, each.output
        assert "process 2 of this program does not answer" in each.output
        assert each.at - failed_at < 15, each.output


@pytest.mark.slow
def test_processes_that_end_well_end_as_without_a_listener() -> None:
    found = run_job(2, "none", -1)
    assert [each.status for each in found] == [0, 0], found
    assert not any("FATAL" in each.output for each in found)


@pytest.mark.slow_variants
@pytest.mark.parametrize("processes", [2, 4])
def test_a_request_to_stop_reaches_all_processes(processes: int) -> None:
    found = run_job(processes, "stop", 1)
    assert [each.status for each in found] == [0] * processes, found
    assert [each.said("stopped") for each in found] == [["True"]] * processes
    for number, each in enumerate(found):
        by = "the test" if number == 1 else "the test (process 1)"
        assert f"stop requested ({by})" in each.output


@pytest.mark.slow
def test_a_loop_on_devices_of_several_processes_cannot_be_stopped_and_says_what_can_be_done() -> None:
    found = run_job(2, "stop together", -1)
    for each in found:
        assert "the read of a request to stop at " in each.output
        assert "runs on devices of several processes" in each.output
        assert 'use stop="processes" for a loop' in each.output
