"""What a document says about cost or time comes from the last run of the benchmarks, or from a constant of the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT))

from tools.documents import costs as document_costs

COSTS = document_costs.read_costs(document_costs.REPORT.read_text(encoding="utf-8"))
DESIGN = ROOT / "docs" / "design"
SOAK = ROOT / "docs" / "reliability.md"  # written by `make soak`, with what that run found
PAGES = [path for path in document_costs.documents() if path.parent != DESIGN and path != SOAK]

MEASURED = re.compile(
    r"(?<![\w.])\d[\d.,]*( to \d[\d.]*)? ?(ns|us|µs|ms)\b"
    r"|\d[\d.,]* times (as|the|faster|slower|longer)\b"
    r"|\b(half|third|quarter|tenth|twentieth|hundredth) (of the time|as long|as much)\b"
    r"|\b(hundreds|thousands|millions) of [a-z]+ (a|per) second\b"
)
SET_IN_CODE = (
    "can be delayed by up to 16 ms",
    "(`sys.setswitchinterval`) to 0.1 ms",
    "could wait 5 ms for the interpreter lock",
    "at most 20 ms after they arrived",
    "100 ms after the first of them",
    "10 ms for one that sleeps",
    "1700000000123456789 ns",  # a time stamp
)
"""Limits that the code, or Python, sets: nothing was measured for them."""

NOTE = "Figures in this note are of the day of the decision; [benchmarks.md](../benchmarks.md) has those of the last"


def test_the_page_of_benchmarks_can_be_read() -> None:
    assert len(COSTS) > 50
    assert "the same" not in {cost.name for cost in COSTS}


@pytest.mark.parametrize("path", document_costs.documents(), ids=lambda path: path.name)
def test_the_figures_in_a_document_are_those_of_the_last_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert document_costs.filled(text, COSTS) == text, "run tools/documents/costs.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_states_no_other_cost(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = document_costs.MARK.sub("FIGURE", text)
    for phrase in SET_IN_CODE:
        text = text.replace(phrase, "")
    found = [text[max(0, m.start() - 40) : m.end() + 20] for m in MEASURED.finditer(text)]
    assert found == [], "mark it (tools/documents/costs.py) or leave it out"


@pytest.mark.parametrize("path", sorted(DESIGN.glob("*.md")), ids=lambda path: path.name)
def test_a_design_note_says_of_when_its_figures_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if MEASURED.search(text):
        assert NOTE in text


@pytest.mark.parametrize(
    "path", [*document_costs.documents(), document_costs.REPORT], ids=lambda path: path.name
)
def test_no_table_has_empty_figures(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r"\|.*\|$", line)]
    empty = [row for row in rows if re.search(r"\|\s*\|\s*\|\s*[^|\s]", row)]
    assert empty == []


def test_the_first_screen_of_the_readme_says_that_no_gpu_was_tried() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    nothing = "No GPU could be reached so far"
    if nothing in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"):
        assert "No GPU has been tried so far" in first
    else:
        assert "docs/gpu.md" in first


def test_the_note_on_costs_says_why_each_missed_row_is_missed() -> None:
    report = document_costs.REPORT.read_text(encoding="utf-8")
    missed = re.findall(r"^\| (.*?) \|.*\| MISSED \|$", report, re.MULTILINE)
    note = (
        (DESIGN / "costs.md").read_text(encoding="utf-8").partition("## Bounds that the last run missed")[2]
    )
    explained = re.findall(r"^\| (.*?) \|", note, re.MULTILINE)[1:]
    assert note

    def is_of(name: str, row: str) -> bool:
        return re.match(rf"{re.escape(name)}($|,? [\d(]|, against)", row) is not None

    assert [row for row in missed if not any(is_of(name, row) for name in explained)] == []
    assert [name for name in explained if not any(is_of(name, row) for row in missed)] == []


def test_a_mark_is_filled_or_refused() -> None:
    report = (
        "| what | ours | spread | peer or limit | its figure | ratio | must be at most | |\n"
        "|---|---|---|---|---|---|---|---|\n"
        "| tap in a scan | 127.25 ns | ±1% | a call | 71.40 ns | 1.78 | 2 | reached |\n"
        "| the same | 127.25 ns | ±1% | the limit | 500.00 ns | 1/3.9 | 1 | reached |\n"
        "| a bar | 1.85 us/step | ±5% | no bar | 0.15 us/step | 12.33 | - |  |\n"
    )
    costs = document_costs.read_costs(report)
    assert document_costs.figure("tap in; ours; a call", costs) == "130 ns"
    assert document_costs.figure("tap in; faster; the limit", costs) == "3.9"
    assert document_costs.figure("a bar; peer", costs) == "0.15 us"
    text = "takes <!-- bench: a bar; ratio -->old<!-- end --> times"
    assert document_costs.filled(text, costs) == "takes <!-- bench: a bar; ratio -->12<!-- end --> times"
    for wrong in ("tap in; ours", "a tap; ours", "a bar; cheaper"):
        with pytest.raises(ValueError, match="expected"):
            document_costs.figure(wrong, costs)
