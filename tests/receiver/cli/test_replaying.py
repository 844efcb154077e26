"""`hcb replay`: its output, calls and files, and its exit status."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_reading import BEGIN_NS, CHECK, LOSS, TEXT, Program

from hcb_command import hcb
from hostcallback.receiver.taplog.writing.recorder import record

FUNCTIONS = """
def take(value, run):
    print("took", float(value["loss"]), run, flush=True)

def fail(value, run):
    raise ValueError(f"no {value['step']}")

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a log of three losses and a text, and a module of functions to bind."""
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for step in range(3):
            program.emit(LOSS, np.float32(step / 2), np.int32(step))
        program.emit(TEXT, np.float32(0.25))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def test_printers_print_and_the_rest_is_counted(folder: Path) -> None:
    result = hcb(folder, "replay", "log")
    assert (result.returncode, result.stdout) == (0, "x = 0.25\n")
    assert (
        result.stderr
        == "replayed 1 message(s); no function takes those of loss (3): --bind NAME=WHERE:FUNCTION\n"
    )


@pytest.mark.parametrize("where", ["functions", "functions.py"])
def test_functions_of_modules_and_files_are_bound(folder: Path, where: str) -> None:
    result = hcb(folder, "replay", "log", "--bind", f"loss={where}:take", "--step", "1:")
    assert (result.returncode, result.stderr) == (0, "replayed 3 message(s)\n")
    assert result.stdout == "took 0.5 7\ntook 1.0 7\nx = 0.25\n"


def test_errors_of_functions_and_failed_checks_are_reported(folder: Path) -> None:
    with record(folder / "log") as recorder:
        Program(recorder).emit(CHECK, np.bool_(False), np.float32(-1))
    result = hcb(folder, "replay", "log", "--bind", "loss=functions:fail")
    assert result.returncode == 1
    assert "hcb: check failed: x = -1.0, at train.py:20 (step)" in result.stderr
    assert "hcb: ValueError: no 0 (raised by tap loss at train.py:12 (step)" in result.stderr


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("loss", "expected NAME=MODULE:FUNCTION"),
        ("loss=functions", "expected NAME=MODULE:FUNCTION"),
        ("loss=nothing:take", "No module named 'nothing'"),
        ("loss=functions:nothing", "has no attribute 'nothing'"),
        ("loss=nothing.py:take", "No such file"),
        ("loss=functions:number", "number is a int, expected a function"),
    ],
)
def test_an_unbindable_function_is_reported(folder: Path, bind: str, text: str) -> None:
    result = hcb(folder, "replay", "log", "--bind", bind)
    assert result.returncode == 1
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_function_for_a_tap_that_the_log_does_not_have_is_refused_with_the_nearest(folder: Path) -> None:
    result = hcb(folder, "replay", "log", "--bind", "los=functions:take")
    assert result.returncode == 2
    assert result.stderr == "hcb: no tap of the log is called 'los'; there are 'loss'\n"
    assert hcb(folder, "replay", "log", "--bind", "los*=functions:take", "--step", "9:").returncode == 0


def test_metrics_are_written(folder: Path) -> None:
    assert hcb(folder, "replay", "log", "--metrics", "scalars.jsonl").returncode == 0
    written = [json.loads(line) for line in (folder / "scalars.jsonl").read_text().splitlines()]
    assert written == [
        *({"step": step, "loss/loss": step / 2} for step in range(3)), {"step": 2, "print/0": 0.25},
    ]  # fmt: skip


@pytest.mark.slow
def test_the_original_timing_can_be_had(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for at in (0.0, 2.0):
            program.emit(replace(TEXT, name="t"), np.float32(at), time_ns=BEGIN_NS + int(at * 10**9))
    start = time.perf_counter()
    assert hcb(tmp_path, "replay", "log", "--speed", "2").returncode == 0
    assert time.perf_counter() - start > 1.0
    result = hcb(tmp_path, "replay", "log", "--speed", "0")
    assert result.returncode == 2
    assert "expected a number above 0" in result.stderr
