"""Runs the tests of JAX and of its libraries in three settings, and compares the outcomes: `python -m tools.upstream`.

Exits with 1 if a test passes plain and fails with this package, unless docs/accelerate.md names it with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.upstream import environment, report
from tools.upstream.differences import Comparison, Difference, Explained, count, read_explained, suspects
from tools.upstream.libraries import LIBRARIES, Library
from tools.upstream.settings import ACCELERATED, PLAIN, ROOT, SETTINGS, Run

FOLDER = ROOT / ".upstream"


def compare(run: Run, tests: Sequence[str], settings: Sequence[str] = SETTINGS) -> Comparison:
    """Runs a library's tests in these settings, and those that differ again alone, in every setting.

    Without the plain setting, those that fail are run again.
    """
    library = run.library
    comparison = Comparison(library.name, library.version)
    outcomes = {}
    for setting in settings:
        started = time.monotonic()
        outcomes[setting] = run.run(setting, tests)
        comparison.counts[setting] = count(outcomes[setting].values())
        counts = ", ".join(f"{n} {what}" for what, n in sorted(comparison.counts[setting].items()))
        print(
            f"{library.name} {setting}: {counts or 'no tests'} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
    alone = {}
    for test, setting in suspects(outcomes):
        if test not in alone:
            alone[test] = run.run_alone(test)
        found = alone[test]
        if found[PLAIN].outcome == "passed" != found[setting].outcome:
            difference = Difference(library.name, test, setting, found[setting].outcome, found[setting].text)
            comparison.differences.append(difference)
        else:
            comparison.in_company.append((test, setting))
            print(f"{library.name} {setting}: alone no difference: {test}", flush=True)
    return comparison


def unexplained(comparison: Comparison, rows: Sequence[Explained]) -> list[Difference]:
    """The differences that no row of the table names."""
    return [
        found
        for found in comparison.differences
        if not any(row.covers(found.library, found.test, found.setting) for row in rows)
    ]


def tests_of(library: Library, full: bool, given: Sequence[str]) -> Sequence[str]:
    """The tests to run: those given, else all or the selected ones."""
    return given or (library.every if full or not library.selected else library.selected)


def main() -> int:
    """Runs the libraries; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", choices=LIBRARIES, action="append", help="run these libraries")
    parser.add_argument("--full", action="store_true", help="run all of their tests, not the selected ones")
    parser.add_argument(
        "--resume", action="store_true", help="keep earlier outcomes, and run what is missing"
    )
    parser.add_argument(
        "--strictest",
        action="store_true",
        help="run accelerated only, and in all settings what fails there: a third of the time",
    )
    parser.add_argument(
        "--sample", type=int, default=1, metavar="N", help="run one test of N, the same ones each time"
    )
    parser.add_argument("--write", action="store_true", help="write the table of docs/accelerate.md")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (2)")
    parser.add_argument(
        "tests", nargs="*", help="run these files or tests of the one library given by --only"
    )
    options = parser.parse_args()
    if options.tests and len(options.only or ()) != 1:
        parser.error(
            "tests are named by their paths in one library: give it by --only, such as --only equinox"
        )

    rows = read_explained()
    libraries = [LIBRARIES[name] for name in options.only or LIBRARIES]
    python = environment.install(FOLDER / "venv", LIBRARIES.values())
    checkouts = os.environ.get("UPSTREAM")
    unknown = 0
    for library in libraries:
        source = environment.source(
            library, Path(checkouts) if checkouts else None, FOLDER / "sources", python
        )
        if source is None:
            print(
                f"{library.name}: NOT TESTED: its sdist holds no tests; give a folder of checkouts by UPSTREAM"
            )
            continue
        folder = FOLDER / "outcomes" / library.name
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        chosen = "" if options.full or options.tests else library.chosen
        run = Run(library, source, python, folder, options.workers, chosen, options.sample)
        folder.mkdir(parents=True, exist_ok=True)
        settings = (ACCELERATED,) if options.strictest else SETTINGS
        comparison = compare(run, tests_of(library, options.full, options.tests), settings)
        report.store(comparison, folder)
        if not comparison.counts[settings[0]].get("passed"):
            unknown += 1
            print(f"{library.name}: no test passed {settings[0]}: see {folder / settings[0]}.log")
        for found in unexplained(comparison, rows):
            unknown += 1
            print(
                f"\n{found.library} {found.setting}: {found.outcome}: {found.test}\n{found.text}", flush=True
            )
    if options.write:
        stored = (report.read_stored(FOLDER / "outcomes" / name) for name in LIBRARIES)
        report.write([comparison for comparison in stored if comparison])
    print(f"upstream: {unknown} unexplained differences or libraries without a test")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
