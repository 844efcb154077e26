"""Runs one library's tests in one setting, and reads the outcomes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.upstream.libraries import Library
from tools.upstream.plugin import ENDED, OUTCOMES, SAMPLE, SETTING

ROOT = Path(__file__).resolve().parents[2]
PLAIN, LOADED, ACCELERATED = "plain", "loaded", "accelerated"
SETTINGS = (PLAIN, LOADED, ACCELERATED)
TEST_SEC = 900
"""How long one test may take before its process is ended; it then counts as crashed."""


class Outcome(NamedTuple):
    """How one test went: passed, skipped, failed, error (outside of the test's function) or crashed."""

    outcome: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Run:
    """The tests of one library.

    Attributes:
        library: whose tests.
        source: the folder with its tests.
        python: the environment's Python.
        folder: where outcomes are stored, one file per setting.
        workers: processes that run tests.
        chosen: which tests run, as `-k` takes it; empty for all.
        sample: n, where one test of n runs.
    """

    library: Library
    source: Path
    python: Path
    folder: Path
    workers: int = 2
    chosen: str = ""
    sample: int = 1

    def run(self, setting: str, tests: Sequence[str]) -> dict[str, Outcome]:
        """Runs the tests that have no outcome yet; returns the outcomes of all that ever ran in this setting.

        Args:
            setting: one of `SETTINGS`.
            tests: files, folders or ids, as pytest takes them.
        """
        outcomes = self.folder / f"{setting}.jsonl"
        for part in self._parts(tests):
            while True:
                before = read_outcomes(outcomes)
                ended = self._pytest(setting, part, outcomes, sorted(before), self.workers, self.chosen)
                # pytest's own end: 0 passed, 1 failures, 5 nothing left to run. Others, such as a crash, go on
                # after it.
                if ended in (0, 1, 5) or len(read_outcomes(outcomes)) == len(before):
                    break
        return read_outcomes(outcomes)

    def _parts(self, tests: Sequence[str]) -> list[Sequence[str]]:
        # What runs in one process each. A folder of a library with `by_file` is many parts.
        if not self.library.by_file:
            return [tests]
        parts: list[Sequence[str]] = []
        for test in tests:
            folder = self.source / test
            files = sorted(folder.rglob("*_test.py")) if folder.is_dir() else []
            parts += [[str(file.relative_to(self.source))] for file in files] or [[test]]
        return parts

    def run_alone(self, test: str) -> dict[str, Outcome]:
        """Runs one test in a new process in each setting; returns the outcomes by setting."""
        file = self.folder / "alone.jsonl"
        file.unlink(missing_ok=True)
        found = {}
        for setting in SETTINGS:
            self._pytest(setting, [test], file, [], 0, "")
            found[setting] = read_outcomes(file).get(test, Outcome("crashed", 0.0, "no outcome"))
            file.unlink(missing_ok=True)
        return found

    def _pytest(
        self,
        setting: str,
        tests: Sequence[str],
        outcomes: Path,
        ended: Sequence[str],
        workers: int,
        chosen: str,
    ) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        left_out = self.folder / "ended.json"
        left_out.write_text(json.dumps(ended), encoding="utf-8")
        command = [self.python, "-m", "pytest", "-q", "-p", "tools.upstream.plugin", "-p", "no:cacheprovider"]
        command += ["-n", str(workers), "--dist", "worksteal"] if workers else ["-p", "no:xdist"]
        command += [f"--timeout={TEST_SEC}", "--timeout-method=thread", "--tb=short", "--no-header"]
        command += [argument for test in self.library.excluded for argument in ("--deselect", test)]
        command += ["-k", chosen] if chosen else []
        environment = {
            **os.environ,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # a third of the time, which is mostly XLA's compiler
            **self.library.environment,
            "PYTHONPATH": str(ROOT),
            SETTING: setting,
            OUTCOMES: str(outcomes),
            ENDED: str(left_out),
            SAMPLE: str(self.sample if workers else 1),
        }
        with (self.folder / f"{setting}.log").open("a", encoding="utf-8") as log:
            log.write(f"\n==== {setting}: {' '.join(tests)}\n")
            log.flush()
            return subprocess.run(
                [*command, *tests],
                cwd=self.source,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).returncode


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """The outcomes in a file, by test. A line that was cut off when its process ended is left out."""
    found: dict[str, Outcome] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            found[entry["test"]] = Outcome(entry["outcome"], entry["seconds"], entry.get("text", ""))
    return found
