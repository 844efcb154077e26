"""The tool that compares the outcomes of others' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkout import ROOT

# Last: where the installed package is tested, this checkout's is not imported.
sys.path.append(str(ROOT))

from tools.upstream import libraries
from tools.upstream.differences import Explained, read_explained, suspects
from tools.upstream.settings import Outcome, Run, read_outcomes

PASSED, FAILED, SKIPPED = (Outcome(what, 0.1, "") for what in ("passed", "failed", "skipped"))


def test_what_passes_plain_and_not_otherwise_is_suspected() -> None:
    outcomes = {
        "plain": {"same": PASSED, "fails": PASSED, "always": FAILED, "missing": PASSED, "skipped": PASSED},
        "loaded": {"same": PASSED, "fails": PASSED, "always": FAILED, "missing": PASSED, "skipped": PASSED},
        "accelerated": {"same": PASSED, "fails": FAILED, "always": PASSED, "skipped": SKIPPED},
    }
    expected = [("fails", "accelerated"), ("missing", "accelerated"), ("skipped", "accelerated")]
    assert suspects(outcomes) == expected


def test_a_row_covers_a_test_and_its_parameters_in_its_setting_only() -> None:
    row = Explained("optax", "a_test.py::test", "accelerated", "because")
    assert row.covers("optax", "a_test.py::test", "accelerated")
    assert row.covers("optax", "a_test.py::test[1-2]", "accelerated")
    assert not row.covers("optax", "a_test.py::test", "loaded")
    assert not row.covers("chex", "a_test.py::test", "accelerated")
    assert not row.covers("optax", "a_test.py::test_other", "accelerated")


@pytest.mark.parametrize(
    "row", ["| optax | `t` | accelerated | |", "| optax | `t` | plain | why |", "| optax | `t` |"]
)
def test_a_row_without_a_reason_or_a_setting_is_refused(tmp_path: Path, row: str) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"<!-- upstream explained -->\n| head |\n|---|\n{row}\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"page\.md explains a difference by the row"):
        read_explained(document)


def test_rows_of_the_table_are_read(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "<!-- upstream explained -->\n| head |\n|---|\n| jax | `a::b` | loaded | why |\n<!-- end -->\n"
    )
    assert read_explained(document) == [Explained("jax", "a::b", "loaded", "why")]


def test_a_line_that_was_cut_off_is_no_outcome(tmp_path: Path) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text('{"test": "a", "outcome": "passed", "seconds": 1}\n{"test": "b", "outc')
    assert read_outcomes(file) == {"a": Outcome("passed", 1, "")}


def test_without_a_plain_run_what_fails_is_suspected() -> None:
    outcomes = {"accelerated": {"same": PASSED, "fails": FAILED, "skipped": SKIPPED}}
    assert suspects(outcomes) == [("fails", "accelerated")]


@pytest.mark.slow
def test_each_file_of_a_folder_runs_in_other_processes_if_its_library_asks_for_it(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout", reason="others' tests run under a time limit")
    (tmp_path / "cases" / "deep").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    body = "import os, pathlib\n\ndef test() -> None:\n    pathlib.Path({!r}).write_text(str(os.getpid()))\n"
    written = [tmp_path / "first", tmp_path / "second"]
    for file, name in zip(written, ("a_test.py", "deep/b_test.py"), strict=True):
        (tmp_path / "cases" / name).write_text(body.format(str(file)))
    library = libraries.Library("many", "1", ("cases",), by_file=True)
    run = Run(library, tmp_path, Path(sys.executable), tmp_path / "outcomes", workers=1)
    outcomes = run.run("plain", library.every)
    assert {test: found.outcome for test, found in outcomes.items()} == {
        "cases/a_test.py::test": "passed",
        "cases/deep/b_test.py::test": "passed",
    }
    first, second = (file.read_text() for file in written)
    assert first != second


@pytest.mark.slow
def test_a_sample_is_the_same_in_each_run(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout", reason="others' tests run under a time limit")
    tests = "import pytest\n\n@pytest.mark.parametrize('n', range(40))\ndef test(n):\n    pass\n"
    (tmp_path / "test_many.py").write_text(tests)
    library = libraries.Library("many", "1", ("test_many.py",))
    once, again = (
        Run(library, tmp_path, Path(sys.executable), tmp_path / str(number), workers=1, sample=4).run(
            "plain", library.every
        )
        for number in range(2)
    )
    assert once.keys() == again.keys()
    assert 2 < len(once) < 25
