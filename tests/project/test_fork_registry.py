"""One registry calls the fork handlers of the modules in a forked child, in the order of the modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from python_process import python_output, run_python

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hostcallback.receiver import processes

def fail():
    raise RuntimeError("planted")

for stage in reversed(processes.Stage):
    processes.in_child(stage, lambda stage=stage: print(stage.name, flush=True))
processes.in_child(processes.Stage.PROGRAM, fail)
processes.in_child(processes.Stage.PROGRAM, lambda: print("after it", flush=True))
if os.fork() == 0:
    os._exit(0)
os.wait()
"""


def test_stages_follow_each_other_and_a_failure_stops_no_other_function() -> None:
    done = run_python("-c", PROGRAM, ROOT, timeout_sec=60)
    stages = ["PROGRAM", "after it", "REMOTE", "CONTROL", "RUNTIME", "TAPLOG", "SINKS", "NATIVE"]
    assert (done.returncode, done.stdout.split("\n")) == (0, [*stages, ""])
    assert "RuntimeError: planted" in done.stderr
    assert "part of a forked child could not be reset" in done.stderr


def test_no_other_module_registers_with_the_interpreter() -> None:
    sources = [*(ROOT / "hostcallback").rglob("*.py")]
    found = [path.name for path in sources if "register_at_fork" in path.read_text(encoding="utf-8")]
    assert found == ["processes.py"]


@pytest.mark.slow
def test_every_stage_of_a_program_has_a_function() -> None:
    code = "import hostcallback.api.receiver; from hostcallback.receiver import processes; "
    code += "print(*(s.name for s in processes.Stage if processes._functions[s]))"
    printed = python_output("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}", timeout_sec=60)
    without_forwarding = {"PROGRAM", "CONTROL", "RUNTIME", "TAPLOG", "SINKS", "NATIVE"}
    assert set(printed.split()) >= without_forwarding
