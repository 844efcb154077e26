"""`tools/gpu_check.py` without a GPU: it reports that, its programs pass on CPU, and wrong messages fail."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import numpy as np
import pytest

from checkout import ROOT
from python_process import run_python

TOOLS = ROOT / "tools"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command, timeout_sec=300, JAX_PLATFORMS="cpu", PYTHONPATH=str(TOOLS.parent))


@pytest.mark.slow
def test_without_a_gpu_it_reports_that_and_exits_with_a_separate_status() -> None:
    done = run(str(TOOLS / "gpu_check.py"))
    assert done.returncode == 3, done.stderr
    assert "JAX has no device of the platform 'gpu' here, so nothing was checked" in done.stdout
    assert "|" not in done.stdout, "no table of nothing"


@pytest.mark.slow
def test_its_programs_pass_on_cpu() -> None:
    done = run(str(TOOLS / "gpu_check.py"), "--platform", "cpu", "--rounds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scalars_in_a_scan: 100,000 messages" in done.stdout
    assert "everything arrived" in done.stdout


@pytest.mark.slow
def test_a_program_with_wrong_messages_fails_the_check() -> None:
    program = """
import sys
from tools.gpu import check
def wrong(device):
    assert False, "message 7 is another"
check.CASES = (wrong, *check.CASES[1:2])
sys.exit(check.main(["--platform", "cpu", "--rounds", "0"]))
"""
    done = run("-c", program)
    assert done.returncode == 1, done.stderr
    assert "wrong: FAILED" in done.stdout
    assert "message 7 is another" in done.stdout
    assert "dtypes: 4 messages" in done.stdout, "the others run all the same"
    assert "messages were WRONG or LOST" in done.stdout


@pytest.mark.parametrize(
    "values", [[1, 2], [1, 2, 3, 3], [1, 3, 2], [1, 2, 4], [1, 2, float("nan")]], ids=str
)
def test_a_message_that_is_wrong_lost_repeated_or_out_of_order_is_seen(values: list[Any]) -> None:
    spec = importlib.util.spec_from_file_location("conformance", TOOLS / "gpu" / "conformance.py")
    assert spec is not None
    assert spec.loader is not None
    conformance = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conformance)
    received = conformance.Received()
    for value in (1, 2, 3):
        received(np.float32(value))
    assert received.are([1, 2, 3]) == 3
    received.values = [np.float32(value) for value in values]
    with pytest.raises(AssertionError):
        received.are([1, 2, 3])
