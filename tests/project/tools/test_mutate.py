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
