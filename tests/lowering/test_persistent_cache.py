"""A second process finds its tapped programs in the persistent compilation cache, and their taps fire."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from python_process import run_python

PROGRAM = Path(__file__).with_name("cached_program.py")


def run(program: Path, cache: Path, seed: str) -> tuple[list[str], list[str]]:
    done = run_python(program, cache, cwd=program.parent, timeout_sec=300, PYTHONHASHSEED=seed)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), [line for line in done.stderr.splitlines() if line.startswith("cache")]


@pytest.mark.slow
@pytest.mark.native_only  # JAX does not cache programs with Python callbacks
def test_a_second_process_hits_the_cache_and_its_taps_fire(tmp_path: Path) -> None:
    first, cache_of_first = run(PROGRAM, tmp_path / "cache", "1")
    # Another folder, as on another host.
    elsewhere = shutil.copy(PROGRAM, tmp_path / PROGRAM.name)
    second, cache_of_second = run(Path(elsewhere), tmp_path / "cache", "2")
    assert len(cache_of_first) == 2
    assert all("misses 0" not in line for line in cache_of_first)
    assert all("hits 0" not in line and "misses 0" in line for line in cache_of_second)
    assert second == first  # the texts' digests as well
    assert sum(line.startswith("tap") for line in first) == 2 * (3 * 2 + 2)
    assert sum(line.startswith("grads") for line in first) == 2


@pytest.mark.slow
def test_programs_are_the_same_text_in_every_process(tmp_path: Path) -> None:
    first, _ = run(PROGRAM, tmp_path / "one", "3")
    elsewhere = shutil.copy(PROGRAM, tmp_path / PROGRAM.name)
    second, _ = run(Path(elsewhere), tmp_path / "two", "4")
    digests = [line for line in first if line.startswith("text")]
    assert len(digests) == 2
    assert [line for line in second if line.startswith("text")] == digests
