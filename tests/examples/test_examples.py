"""The examples work as documented when a user runs them; so do the code blocks of the documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT

DIGITS = ROOT / "examples" / "train_digits.py"

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
STEPS_PER_EPOCH = 44


def run(*arguments: str | Path, cwd: Path, transport: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user would: one CPU device; `transport` is by default the one this test run is about."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    if transport is not None:
        environment["HOSTCALLBACK_TRANSPORT"] = transport
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def line_of(text: str) -> int:
    """The number of the one line of the example that contains `text`."""
    lines = DIGITS.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return number


@pytest.mark.slow
def test_train_digits_prints_plots_and_sums_up(tmp_path: Path) -> None:
    result = run(DIGITS, "--epochs", "12", "--every", "50", "--output", "curves.png", cwd=tmp_path)
    assert result.returncode == 0, result.stderr

    steps = 12 * STEPS_PER_EPOCH
    printed = [int(step) for step in re.findall(r"step=(\d+)", result.stdout)]
    assert printed == list(range(0, steps, 50))
    losses = [float(loss) for loss in re.findall(r"loss=([\d.e-]+)", result.stdout)]
    assert losses[-1] < losses[0] / 5

    said = re.search(rf"{steps} steps, validation accuracy ([\d.]+)%", result.stdout)
    assert said
    assert float(said[1]) > 90
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_MAGIC)

    head, row = result.stdout.splitlines()[-2:]
    summary = dict(zip(re.split(r"\s{2,}", head.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    assert int(summary["messages"].replace(",", "")) == steps + len(printed)
    assert summary["dropped"] == "0"
    assert {"device", "bytes", "rate", "time in taps"} <= set(summary)


@pytest.mark.slow
def test_train_digits_reports_every_exception_of_a_failing_tap_after_training(
    tmp_path: Path,
) -> None:
    result = run(DIGITS, "--epochs", "12", "--raise-in-tap", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{12 * STEPS_PER_EPOCH} steps, validation accuracy" in result.stdout
    assert "TapFunctionException" in result.stderr
    log, traceback = result.stderr.split("Traceback (most recent call last)", 1)
    assert re.findall(r"ValueError: step (\d+) is a round number", log) == ["0"]  # at once
    raised = re.findall(
        r"^  \| ValueError: step (\d+) is a round number|^    \| ValueError: step (\d+)", traceback, re.M
    )
    assert ["".join(pair) for pair in raised] == ["0", "500"]
    tap_line = f"train_digits.py:{line_of('hcb.id_tap(tap_func, metrics)')}"
    assert result.stderr.count(tap_line) >= 2


@pytest.mark.slow
def test_train_digits_refuses_a_number_it_cannot_use(tmp_path: Path) -> None:
    result = run(DIGITS, "--every", "0", cwd=tmp_path)
    assert result.returncode == 2
    assert "argument --every: got 0, expected at least 1" in result.stderr


def code_blocks() -> list[Any]:
    """The Python blocks of the documents that promise to run."""
    found = []
    for document in ("README.md", "docs/accelerate.md", "docs/checks.md", "docs/migrating.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
        assert blocks, document
        found += [pytest.param(block, id=f"{document}-{n}") for n, block in enumerate(blocks)]
    return found


@pytest.mark.slow_variants
@pytest.mark.parametrize("code", code_blocks())
def test_documented_example_runs_and_prints_as_documented(tmp_path: Path, code: str) -> None:
    """The `# prints: ` comments of an example state its output, line by line and in order."""
    (tmp_path / "example.py").write_text(code)
    # JAX exports no Python callbacks.
    result = run("example.py", cwd=tmp_path, transport="native" if "jax.export" in code else None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == re.findall(r"# prints: (.*)", code)
