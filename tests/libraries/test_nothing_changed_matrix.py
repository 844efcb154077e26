"""The matrix of "nothing changed": a part of it holds, and it finds features that change something."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkout import ROOT

sys.path.append(str(ROOT))
pytest.importorskip("optax", reason="needs optax, of the extra `libraries`")

from tools.nothing_changed.cell import PROGRAMS
from tools.nothing_changed.compare import comparable
from tools.nothing_changed.features import FEATURES, Feature, named
from tools.nothing_changed.report import Cell, Difference, Explained, Matrix
from tools.nothing_changed.run import REPORT, run

WRONG = {
    "RESULTS": "results",
    "TRACES": "traces",
    "PROGRAMS": "programs",
    "TAPS": "programs",
    "EXCEPTION": "exception",
    "OUTPUT": "stdout",
    "ERRORS": "stderr",
    "STATUS": "exit status",
    "KEYS": "cache keys",
}


@pytest.mark.native_only
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["optax_adam", "jax_debug"])
def test_nothing_changed_in_a_program(program: str, tmp_path: Path) -> None:
    pytest.importorskip("flax")
    matrix = run([program], FEATURES, tmp_path)
    assert not list(matrix.unexplained())


@pytest.mark.native_only
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_feature_that_changes_something_is_found(tmp_path: Path) -> None:
    features = {f"wrong_features:{name}": named(f"wrong_features:{name}") for name in WRONG}
    row = run(["optax_adam"], features, tmp_path).rows["optax_adam"]
    found = {name: {d.kind for d in cell.differences} for name, cell in row.items() if cell is not None}
    assert not found.pop("bare")
    assert {name.partition(":")[2] for name in found} == {*WRONG}
    for name, kind in WRONG.items():
        assert kind in found[f"wrong_features:{name}"], f"{name}: {found}"


def test_the_page_has_every_program_and_feature() -> None:
    page = REPORT.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert [cell.strip("| ") for cell in rows[0]] == ["program", *(f.name for f in FEATURES.values())]
    assert {row[0].strip("| ") for row in rows[1:-1]} == {path.stem for path in PROGRAMS.rglob("*.py")}


def test_a_difference_without_an_explanation_is_told() -> None:
    feature = Feature("some", lambda edits, folder: None)
    cells = {"some": Cell([Difference("stdout", "'a', not 'b'"), Difference("results", "1 of 2")], 1.5)}
    known = Explained("pro*", "some", ("results",), "because")
    matrix = Matrix({"some": feature}, {"program": dict(cells)}, [known])
    assert list(matrix.unexplained()) == ["program under some: stdout: 'a', not 'b'"]
    page = matrix.page("versions")
    assert "| program | **stdout**, results (1) |" in page
    assert "| processor time | 1.50 |" in page
    assert page.endswith("1. because\n")


def test_a_program_is_compared_without_places_and_addresses() -> None:
    texts = [
        f'#loc1 = loc("x")\n%0 = stablehlo.sine %a : tensor<f32> loc(#loc{n})\n'
        f'call @f(%0) {{index = 1{n * 10**9}}} loc("jit(f)"(callsite(#loc{n} at #loc2)))'
        for n in (1, 2)
    ]
    assert comparable(texts[0]) == comparable(texts[1])
    assert "stablehlo.sine %a : tensor<f32>" in comparable(texts[0])
    assert comparable(texts[0].replace("sine", "cosine")) != comparable(texts[0])
