"""The tool that changes random lines: its changes are programs, and the tests of the room notice one that matters."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT))

from tools import mutate


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_changes_are_other_programs_in_one_line(seed: int) -> None:
    for mutation in mutate.sample(300, seed, ""):
        source = (ROOT / mutation.path).read_text(encoding="utf-8")
        changed = source[: mutation.start] + mutation.text + source[mutation.end :]
        assert changed != source
        assert (
            source.count("\n", 0, mutation.start) < mutation.line <= source.count("\n", 0, mutation.end) + 1
        )
        if mutation.path.suffix == ".py":
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_each_room_has_tests() -> None:
    for file in (ROOT / mutate.PACKAGE).rglob("*.py"):
        for folder in mutate.tests_of(file.relative_to(ROOT)):
            assert (ROOT / folder).exists()


FRAME = Path("hostcallback/receiver/wire/frame.py")


class Measured:
    """Stands for what coverage has read."""

    def __init__(self, contexts: dict[int, list[str]]) -> None:
        self._contexts = contexts

    def measured_files(self) -> set[str]:
        return {f"/elsewhere/{FRAME}"}

    def contexts_by_lineno(self, filename: str) -> dict[int, list[str]]:
        assert filename == f"/elsewhere/{FRAME}"
        return self._contexts


def test_the_tests_that_run_a_changed_line() -> None:
    source = (ROOT / FRAME).read_text(encoding="utf-8")
    tree = ast.parse(source)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    line = function.body[-1].lineno
    changed = mutate.Mutation(FRAME, line, 0, 0, "")
    assert mutate.statement_lines(source, line) == range(line, line + 1)
    wire, api = (
        "tests/receiver/wire/test_frames.py::test_a[x | y]",
        "tests/api/taps/test_arguments.py::test_b",
    )
    found = mutate.Coverage(Measured({line: [f"{wire}|run", f"{wire}|setup", f"{api}|run"]})).tests(changed)
    assert found == ([api, wire], True)
    assert mutate.of_room(found[0], FRAME) == [wire]
    assert mutate.Coverage(Measured({line: ["", f"{wire}|run"]})).tests(changed) == ([wire], False)
    assert mutate.Coverage(Measured({line - 1: [f"{wire}|run"]})).tests(changed) == ([], False)
    other = mutate.Mutation(Path("hostcallback/receiver/wire/decoder.py"), line, 0, 0, "")
    assert mutate.Coverage(Measured({line: [f"{wire}|run"]})).tests(other) == ([], False)


def test_a_change_within_a_statement_of_several_lines() -> None:
    source = "def f(x):\n    if x:\n        return (\n            x,\n            1 + 2,\n        )\n    return x\n"
    assert mutate.statement_lines(source, 5) == range(3, 6)
    assert mutate.statement_lines(source, 2) == range(2, 3)
    assert mutate.statement_lines(source, 7) == range(7, 8)


@pytest.mark.slow
def test_tests_of_the_room_notice_a_change(tmp_path: Path) -> None:
    path = Path("hostcallback/receiver/wire/frame.py")
    source = (ROOT / path).read_text(encoding="utf-8")
    start = source.index("struct.Struct(")
    changed = mutate.Mutation(path, 1, start, start + len("struct.Struct("), "struct.Struct('x' + ")
    harmless = mutate.Mutation(path, 1, 0, 0, "\n")
    copy = mutate.Copy(tmp_path)
    tests = ["tests/receiver/wire/test_frames.py"]
    assert copy.noticed_by(changed, tests).startswith(tests[0])
    assert copy.noticed_by(harmless, tests) == ""
    assert copy.first_noticed(changed, [[], tests]).startswith(tests[0])
    (copy._root / tests[0]).write_text(
        "import pytest\n\n@pytest.mark.parametrize('x', ['a b'])\ndef test_that_fails(x):\n    assert False, 'c - d'\n"
    )
    with pytest.raises(RuntimeError, match=r"test_that_fails\[a b\] fails without a change, too"):
        copy.first_noticed(harmless, [tests])
    (copy._root / tests[0]).write_text(
        "from pathlib import Path\n\n\ndef test_by_chance():\n    there = Path('fails').exists()\n"
        "    Path('fails').unlink(missing_ok=True)\n    assert not there\n\n\ndef test_that_passes():\n    pass\n"
    )
    (copy._root / "fails").touch()
    assert copy.noticed_by(harmless, tests).endswith("::test_by_chance")
    (copy._root / "fails").touch()
    assert copy.first_noticed(harmless, [tests]) == ""
    assert not (copy._root / "fails").exists()
