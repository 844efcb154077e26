"""The examples work as documented when a user runs them; so do the code blocks of the documents."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT
from python_process import run_python
from terminals import in_terminal

DIGITS = ROOT / "examples" / "train_digits.py"

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
STEPS_PER_EPOCH = 44


def run(*arguments: str | Path, cwd: Path, transport: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user would: one CPU device; `transport` is by default the one this test run is about."""
    chosen = {} if transport is None else {"HOSTCALLBACK_TRANSPORT": transport}
    return run_python(*arguments, cwd=cwd, timeout_sec=110, XLA_FLAGS=None, **chosen)


def line_of(text: str) -> int:
    """The number of the one line of the example that contains `text`."""
    lines = DIGITS.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return number


@pytest.mark.slow
def test_train_digits_prints_plots_and_sums_up(tmp_path: Path) -> None:
    options = ["--epochs", "12", "--every", "50", "--output", "curves.png"]
    status, shown = in_terminal(DIGITS, *options, cwd=tmp_path)
    assert status == 0, shown
    steps = 12 * STEPS_PER_EPOCH
    # One line for each record, above the bar.
    records = re.findall(r"(?:^|\r|\n)step +(\d+)  loss ([\d.]+)  accuracy +([\d.]+)%\r\n", shown)
    assert [int(step) for step, _, _ in records] == list(range(0, steps, 50))
    assert float(records[-1][1]) < float(records[0][1]) / 5
    assert re.search(rf"\rtrain: +\d+%\|.*/{steps} \[", shown)
    lines = re.sub(r"[^\n]*\r(?!\n)", "", shown).replace("\r", "").splitlines()

    said = [re.match(rf"{steps} steps, validation accuracy ([\d.]+)%", line) for line in lines]
    (accuracy,) = filter(None, said)
    assert float(accuracy[1]) > 90
    assert "curves in curves.png" in lines
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG_MAGIC)

    (place,) = (n for n, line in enumerate(lines) if line.startswith("device  messages"))
    head, row = lines[place : place + 2]
    summary = dict(zip(re.split(r"\s{2,}", head.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    # A tap a step, the printed records, a tap an epoch, and the bar: ten messages a second.
    others = int(summary["messages"].replace(",", "")) - (steps + len(records) + 12)
    assert 2 <= others < steps / 2
    assert summary["dropped"] == "0"
    assert {"device", "bytes", "rate", "time in taps"} <= set(summary)

    plain, returned, tapped, cost = lines[-4:]
    seconds = [float(re.search(r" ([\d.]+) s ", line)[1]) for line in (returned, tapped)]  # type: ignore[index]
    assert re.match(r"training without metrics .* us a step", plain)
    assert re.match(r"training that returns its metrics .* us a step", returned)
    assert re.match(r"training with its taps .* us a step", tapped)
    percent = re.match(r"what the taps cost +([+-][\d.]+)% .* us a step", cost)
    assert percent
    assert float(percent[1]) == pytest.approx(100 * (seconds[1] / seconds[0] - 1), abs=2)


@pytest.mark.slow
def test_train_digits_tells_its_results_if_a_tap_fails_and_no_picture_can_be_written(tmp_path: Path) -> None:
    result = run(DIGITS, "--epochs", "12", "--raise-in-tap", "--output", "nowhere/curves.png", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout.startswith("step     0  loss ")  # without a terminal there is no bar
    assert "\r" not in result.stdout + result.stderr
    assert f"{12 * STEPS_PER_EPOCH} steps, validation accuracy" in result.stdout
    before, traceback = result.stderr.split("Traceback (most recent call last)", 1)
    assert "\nnowhere/curves.png could not be written: " in before
    assert re.findall(r"ValueError: step (\d+) is a round number", before) == ["0"]  # at once
    assert "TapFunctionException: 2 tap function call(s) raised" in traceback
    assert "ValueError: step 0 is a round number" in traceback
    tap_line = f"train_digits.py:{line_of('hcb.id_tap(tap_func, metrics)')}"
    assert result.stderr.count(tap_line) >= 2


@pytest.mark.slow
def test_train_digits_refuses_a_number_it_cannot_use(tmp_path: Path) -> None:
    result = run(DIGITS, "--every", "0", cwd=tmp_path)
    assert result.returncode == 2
    assert "argument --every: got 0, expected at least 1" in result.stderr


@pytest.mark.slow
def test_metrics_and_data_writes_files_and_reads_taps(tmp_path: Path) -> None:
    result = run(ROOT / "examples" / "metrics_and_data.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "csv metrics.csv: 315 records" in result.stdout
    assert re.search(r"loss 3\.\d+ -> 0\.0000\d+ in 300 steps", result.stdout), result.stdout
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-1].startswith("299,")
    assert len(list((tmp_path / "runs" / "line").iterdir())) == 1


ONE_PROGRAM = ("docs/capsules.md",)
"""Documents of which each block goes on from the blocks before it."""


def code_blocks() -> list[Any]:
    """The Python blocks of the documents that promise to run."""
    found = []
    for document in (
        "README.md",
        "docs/accelerate.md",
        "docs/capsules.md",
        "docs/checks.md",
        "docs/data.md",
        "docs/examples.md",
        "docs/knobs.md",
        "docs/metrics.md",
        "docs/migrating.md",
    ):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
        assert blocks, document
        if document in ONE_PROGRAM:
            blocks = ["\n".join(blocks)]
        found += [pytest.param(block, id=f"{document}-{n}") for n, block in enumerate(blocks)]
    return found


@pytest.mark.slow_variants
@pytest.mark.parametrize("code", code_blocks())
def test_documented_example_runs_and_prints_as_documented(tmp_path: Path, code: str) -> None:
    """The `# prints: ` comments of an example state its output, line by line and in order."""
    (tmp_path / "example.py").write_text(code)
    # JAX exports no Python callbacks, and capsules have exported programs.
    exports = "jax.export" in code or "hcb.capsule" in code
    result = run("example.py", cwd=tmp_path, transport="native" if exports else None)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == re.findall(r"# prints: (.*)", code)


@pytest.mark.slow
def test_the_observing_example_prints_a_table_of_activations_and_gradients_for_each_step(
    tmp_path: Path,
) -> None:
    result = run(ROOT / "examples" / "observe.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    header, *rows = [line.split() for line in result.stdout.splitlines()][:7]
    assert header == ["value", "mean", "std", "min", "max", "norm", "zeros", "nonfinite"]
    labels = [" ".join(row[:-7]) for row in rows]
    assert labels == [
        f"{kind}layers/{i}" for kind, order in (("", (0, 1, 2)), ("grad ", (2, 1, 0))) for i in order
    ]
    assert all(float(row[-2]) == 0 == float(row[-1]) for row in rows)
    assert result.stdout.count("grad layers/0") == 3


@pytest.mark.slow
def test_the_documented_times_of_parts_are_a_table_and_axes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "time.md").read_text(), re.DOTALL)
    code = "\n".join(blocks)
    (tmp_path / "example.py").write_text(code)
    result = run("example.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    printed, expected = result.stdout.splitlines(), re.findall(r"# prints: (.*)", code)
    assert printed[-len(expected) :] == expected
    lines = printed[: printed.index("")]
    slowest = printed[len(lines) + 1 : -len(expected)]
    assert slowest[0].startswith("slowest ")
    assert len(slowest) == 6
    assert [line.split("  ")[0] for line in lines] == [
        "place", *(f"layers/{i}" for i in range(3)), *(f"backward layers/{i}" for i in (2, 1, 0)), "program"
    ]  # fmt: skip
    assert all(re.search(r" 100  .* %$", line) for line in lines[1:])
