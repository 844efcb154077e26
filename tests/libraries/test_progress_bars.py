"""Libraries that show progress bars, unedited: under `hcb.accelerate()` their output is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from terminals import screen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

WANTED = os.environ.get("HOSTCALLBACK_TEST_LIBRARIES") == "required"
"""Set where a missing library is a failure."""


class Library(NamedTuple):
    """Requirements and properties of a program of `bar_programs.py`.

    Attributes:
        module: the module that must be installed.
        callback: the functions of JAX that it calls and `accelerate` replaces. `pure_callback` stays JAX's.
        bars: number of tqdm bars that it shows.
    """

    module: str
    callback: str
    bars: int


PROGRAMS = {
    "jax_tqdm_scan": Library("jax_tqdm", "jax.debug.callback", 3),
    "jax_tqdm_loop": Library("jax_tqdm", "jax.debug.callback", 1),
    "diffrax_tqdm": Library("diffrax", "io_callback", 2),
    "diffrax_text": Library("diffrax", "io_callback", 0),
    "numpyro_chains": Library("numpyro", "io_callback", 2),
    "blackjax_nuts": Library("jaxtap", "jax.debug.callback", 1),
}

# JAX waits for callbacks at dispatch, on the CPU. Accelerated it does not, and blackjax's bar ends with its block, even
# while the program runs: as on a GPU, the block has to wait.
WAITS_BY_ITSELF = [name for name in PROGRAMS if name != "blackjax_nuts"]

RUN_SEC = 200
"""Most of it is compilation."""

# A program takes seconds to compile.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.native_only,
    pytest.mark.timeout(2 * RUN_SEC + 60),
]


@pytest.fixture
def library(program: str) -> Library:
    """Skips the test, or fails it where the library must be there."""
    library = PROGRAMS[program]
    if importlib.util.find_spec(library.module) is None:
        text = f"{library.module} is not installed: pip install -e '.[libraries]'"
        if WANTED:
            pytest.fail(text)
        pytest.skip(text)
    return library


class Output(NamedTuple):
    """Output of a program."""

    stdout: str
    stderr: str


def ran(program: str, how: str, end: str = "blocking") -> Output:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # numpyro shows no bar where it sees one of these.
    environment = {k: v for k, v in environment.items() if k != "CI" and not k.startswith("PYTEST_")}
    # A sampler amplifies last bits, which the tests' quick compilation changes.
    if program == "numpyro_chains":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, str(HERE / "bar_programs.py"), program, how, end],
        env=environment,
        capture_output=True,
        timeout=RUN_SEC,
        check=False,
    )
    output = Output(result.stdout.decode(), result.stderr.decode())  # with its carriage returns
    assert result.returncode == 0, output.stderr
    for sign in ("Traceback", "Error", "Warning"):
        assert sign not in output.stderr, output.stderr
    return output


def bars_on_screen(text: str) -> list[str]:
    """The final lines of tqdm's bars on a terminal, without the lines that were overwritten."""
    return [line for line in screen(text) if "%|" in line]


def assert_full(lines: list[str], bars: int) -> None:
    full = [line for line in lines if re.match(r"100\.00%\||.*100%\|.*\| (\d+)/\1 ", line)]
    assert len(full) == bars, lines
    # tqdm keeps the row of a second bar when the first one is closed, and draws its last state a row higher: if it
    # was drawn in between, an earlier state stays below.
    assert len(lines) == bars or bars > 1, lines


@pytest.mark.parametrize("program", PROGRAMS)
def test_bars_are_full_and_closed_when_the_results_are_ready(program: str, library: Library) -> None:
    outputs = [ran(program, how) for how in ("accelerated", "plain")]
    printed = [output.stdout.splitlines() for output in outputs]
    ours, plain = (json.loads(lines[-1]) for lines in printed)

    assert {line.split(" at ")[0] for line in ours["callbacks"]} == {f"taken over: {library.callback}"}
    for found in (ours, plain):
        assert len(found["bars"]) == library.bars
        for bar in found["bars"]:
            assert bar["n"] == bar["total"]
            assert bar["closed"]
        assert found["at the barrier"] == found["bars"]
        assert found["shown late"] == 0
    for output in outputs:
        lines = bars_on_screen(output.stderr)
        assert_full(lines, library.bars)
    assert printed[0][:-1] == printed[1][:-1]  # of TextProgressMeter
    for mine, theirs in zip(ours["results"], plain["results"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("program", WAITS_BY_ITSELF)
def test_bars_of_a_program_that_ends_at_once_end_at_their_totals(program: str, library: Library) -> None:
    output = ran(program, "accelerated", "leaving")
    lines = bars_on_screen(output.stderr)
    assert_full(lines, library.bars)
    if program == "diffrax_text":
        assert output.stdout.splitlines()[-1] == "100.00%"
