"""The pytest plugin in which others' tests run: begins the setting, and stores each test's outcome as it ends.

Loaded by `-p tools.upstream.plugin`, into pytest and into the workers of xdist.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest

SETTING, OUTCOMES, ENDED = "UPSTREAM_SETTING", "UPSTREAM_OUTCOMES", "UPSTREAM_ENDED"
"""Variables with the setting, the file to which outcomes are appended, and the file with the tests to leave out."""

SAMPLE = "UPSTREAM_SAMPLE"
"""Variable with n: one test of n runs, chosen by the checksum of its name, so that every run chooses the same."""

MAX_TEXT = 6000


def begin_loaded() -> None:
    """Uses the package once: a compiled program with a tap, and a barrier."""
    import jax

    import hostcallback as hcb

    def program(x: Any) -> Any:
        return hcb.id_tap(lambda value: None, x) + 1

    jax.jit(program)(1.0)
    hcb.barrier_wait()


def begin_accelerated() -> None:
    """Accelerates the callbacks of the process from here on."""
    import hostcallback as hcb

    hcb.accelerate()


BEGIN = {"plain": lambda: None, "loaded": begin_loaded, "accelerated": begin_accelerated}
"""The settings, by what they do before the first test."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests whose outcome is known from a run that was stopped, and those outside of the sample."""
    file = os.environ.get(ENDED)
    ended = set(json.loads(Path(file).read_text(encoding="utf-8"))) if file else set()
    one_of = int(os.environ.get(SAMPLE, "1"))
    kept = [
        item for item in items if item.nodeid not in ended and zlib.crc32(item.nodeid.encode()) % one_of == 0
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins the setting. Test modules configure JAX when they are imported, which must come first."""
    if session.items and not session.config.option.collectonly:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            BEGIN[os.environ[SETTING]]()


class Outcomes:
    """Appends one line of JSON per test to a file."""

    def __init__(self, path: Path) -> None:
        """Opens the file."""
        self._file = path.open("a", encoding="utf-8")
        self._reports: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stores the outcome once the test's last phase has ended, or its process has died."""
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        del self._reports[report.nodeid]
        line = {
            "test": report.nodeid,
            "outcome": _outcome(reports),
            "seconds": round(sum(phase.duration for phase in reports), 3),
        }
        failed = [phase for phase in reports if phase.failed]
        if failed:
            line["text"] = failed[0].longreprtext[-MAX_TEXT:]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_unconfigure(self) -> None:
        """Closes the file."""
        self._file.close()


def _outcome(reports: list[pytest.TestReport]) -> str:
    last = reports[-1]
    if last.when != "teardown":
        return "crashed"
    for report in reports:
        if report.failed:
            return "failed" if report.when == "call" else "error"
    return "skipped" if any(report.skipped for report in reports) else "passed"


def pytest_configure(config: pytest.Config) -> None:
    """Stores outcomes in the process that gets the reports: not in a worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ[OUTCOMES])), "upstream-outcomes")
