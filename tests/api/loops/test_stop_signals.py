"""Requests to stop from outside of the process: Ctrl-C, SIGTERM, `hcb ctl`; a run that goes on after one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from checkout import ROOT
from hcb_command import hcb
from python_process import python_output, start_python

PROGRAM = Path(__file__).with_name("stopped_program.py")
EXAMPLE = ROOT / "examples" / "stop_and_resume.py"

pytestmark = pytest.mark.native_only  # the native library watches signals on each transport


@contextmanager
def running(*arguments: str | Path, first: str) -> Iterator[subprocess.Popen[str]]:
    """The process, once it has printed a line that begins with `first`."""
    process = start_python(*arguments, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(first)
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow_variants
@pytest.mark.parametrize("calls", [[], ["calls"]], ids=["alone", "calls"])
def test_the_first_ctrl_c_stops_the_loop_and_the_second_one_is_pythons(calls: list[str]) -> None:
    with running(PROGRAM, *calls, first="runs") as process:
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "stopped True"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "interrupted"
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "stop requested (Ctrl-C; another one interrupts)" in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_hcb_ctl_stops_the_loop_and_ctrl_c_is_pythons_then(tmp_path: Path) -> None:
    with running(PROGRAM, first="runs") as process:
        done = hcb(tmp_path, "ctl", str(process.pid), "stop")
        assert (done.stdout, done.stderr) == ("stop requested: hcb ctl\n", "")
        assert line_of(process) == "stopped True"
        again = hcb(tmp_path, "ctl", str(process.pid), "stop")
        assert again.stderr.startswith("hcb: no loop with stop=True runs now; those that begin later end")
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "interrupted"


@pytest.mark.slow
def test_the_first_sigterm_stops_the_loop_and_the_second_one_ends_the_process() -> None:
    with running(PROGRAM, "signals", first="runs") as process:
        process.send_signal(signal.SIGTERM)
        assert line_of(process) == "stopped True"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
        assert "stop requested (SIGTERM; another one ends the process)" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no loop", "interrupted"),
        ("failed loop", "interrupted"),
        ("own handler", "handled"),
        ("child", "interrupted"),
    ],
)
def test_ctrl_c_is_pythons_while_no_loop_runs(how: str, says: str) -> None:
    process = start_python(PROGRAM, how, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        word, pid = process.stdout.readline().split()
        assert word == "runs"
        os.kill(int(pid), signal.SIGINT)
        assert line_of(process) == says
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_run_that_sigterm_stopped_goes_on_and_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    assert "finished" in python_output(EXAMPLE, whole)
    with running(EXAMPLE, parts, first="training from step 0") as process:
        process.send_signal(signal.SIGTERM)
        saved, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "saved; start again to go on" in saved
    assert "finished" in python_output(EXAMPLE, parts)
    expected, found = np.load(whole), np.load(parts)
    assert set(expected) == set(found)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
