"""The matrix runs the available pairs, reports the unavailable ones, and fails when a pair fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checkout import ROOT

THIS = sys.version_info[:2]


@pytest.fixture
def matrix() -> Iterator[ModuleType]:
    """The tool as a module, freshly loaded."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools" / "matrix.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["matrix"]


@pytest.fixture
def interpreters(matrix: ModuleType) -> list[Any]:
    """A Python older than this one, this one, and two newer ones, the newest of which has no jaxlib."""
    major, minor = THIS
    return [matrix.Interpreter((major, minor + step), f"python3.{minor + step}") for step in (-1, 0, 1, 2)]


def test_the_floor_comes_from_setup_cfg(matrix: ModuleType) -> None:
    assert matrix.supported() == ((3, 11), "0.8.0")


@pytest.mark.slow
def test_this_interpreter_is_found(matrix: ModuleType) -> None:
    assert THIS in [found.version for found in matrix.find_interpreters((3, 11))]


def test_a_path_that_does_not_run_is_not_an_interpreter(matrix: ModuleType, tmp_path: Path) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert matrix.probe(str(shim)) is None
    assert matrix.probe(str(tmp_path / "absent")) is None


def test_three_pairs_where_everything_can_be_had(
    matrix: ModuleType,
    interpreters: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(matrix, "has_jax", lambda interpreter: interpreter != interpreters[3])
    pairs = matrix.plan(interpreters, interpreters[0].version, "0.8.0")
    assert [(pair.name, pair.interpreter) for pair in pairs] == [
        ("oldest", interpreters[0]),
        ("default", interpreters[1]),
        ("newest", interpreters[2]),
    ]
    assert pairs[0].jax == ("jax==0.8.0", "jaxlib==0.8.0")
    assert "MISSING" not in capsys.readouterr().out


def test_missing_interpreters_are_named(
    matrix: ModuleType, interpreters: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = matrix.plan([interpreters[1]], interpreters[0].version, "0.8.0")
    assert [(pair.name, pair.interpreter) for pair in pairs] == [
        ("oldest", interpreters[1]),
        ("default", interpreters[1]),
    ]
    said = capsys.readouterr().out
    assert f"MISSING: no Python {interpreters[0]} " in said
    assert f"MISSING: no Python newer than {interpreters[1]} " in said


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [None, "pip", "pytest"])
def test_a_failing_pair_is_in_the_table_and_in_the_exit_status(
    matrix: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    breaks: str | None,
) -> None:
    def run(command: list[Any], **environment: str) -> str:
        if breaks in command:
            raise subprocess.CalledProcessError(1, command, f"{breaks} says no")
        return "=== 7 passed in 1.00s ===" if "pytest" in command else "3.11.7 0.8.0"

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "build_wheel", lambda: Path("hostcallback.whl"))
    monkeypatch.setattr(matrix, "has_jax", lambda interpreter: True)
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--only", "oldest"])

    assert matrix.main() == (0 if breaks is None else 1)
    said = capsys.readouterr().out
    if breaks is None:
        assert said.count("7 passed in 1.00s") == len(matrix.TRANSPORTS)
        assert "1 of 1 pairs passed" in said
    else:
        assert f"{breaks} says no" in said
        assert "0 of 1 pairs passed" in said


def test_the_folders_of_tests_exist(matrix: ModuleType) -> None:
    assert [room for room in matrix.ROOMS if not (ROOT / "tests" / room).is_dir()] == []
