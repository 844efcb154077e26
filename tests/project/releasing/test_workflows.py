"""The workflows of GitHub run what is there: targets of make, and a program that tries the wheels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from checkout import ROOT
from python_process import python_output

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    """What the steps of a workflow run."""
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_they_call_targets_that_exist() -> None:
    assert [path.name for path in WORKFLOWS] == ["tests.yml", "wheels.yml"]
    targets = set(
        re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    called = {
        target
        for path in WORKFLOWS
        for command in commands(path)
        if command.startswith("make ")
        for target in command.split()[1:]
    }
    assert {"lint", "type", "test", "docs", "wheel"} == called
    assert called <= targets


def test_no_job_may_write_or_run_without_end() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        assert all(0 < job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


@pytest.mark.native_only
def test_the_program_that_tries_a_wheel_runs(tmp_path: Path) -> None:
    (command,) = [text for text in commands(ROOT / ".github/workflows/wheels.yml") if "PROGRAM" in text]
    found = re.search(r"<<'PROGRAM'\n(.*?)\nPROGRAM\n", command, re.DOTALL)
    assert found
    (tmp_path / "program.py").write_text(found[1])
    python_output("program.py", cwd=tmp_path, timeout_sec=110)


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
