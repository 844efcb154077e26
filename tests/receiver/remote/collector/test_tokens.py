"""The lines of a token file: permission to write and follow runs, and to control their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcallback.receiver.errors import RemoteError
from hostcallback.receiver.remote.collector.access import Access, may


def access(folder: Path, text: str) -> Access:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return Access.from_file(path)


def given(token: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "x"), ("authorization", f"Bearer {token}"))


def test_each_line_grants_one_thing(tmp_path: Path) -> None:
    found = access(tmp_path, "# mine\nwriter exp* a\nwriter b\n\nboss +control exp*\nall\nall +control\n")
    runs, controls = found.runs_of(given("writer")), found.controls_of(given("writer"))
    assert runs is not None
    assert [run for run in ("exp1", "a", "b", "c") if may(runs, run)] == ["exp1", "a", "b"]
    assert controls == ()
    assert found.runs_of(given("boss")) == ()
    assert found.controls_of(given("boss")) == ("exp*",)
    assert found.runs_of(given("all")) == found.controls_of(given("all")) == ("*",)
    for token in ("", "Boss", "bos", "boss "[:-2], "+control", "\N{SNOWMAN}"):
        assert found.runs_of(given(token)) is None
        assert found.controls_of(given(token)) is None
    assert found.runs_of(()) is None


def test_without_a_file_everybody_may_everything() -> None:
    assert Access().runs_of(()) == Access().controls_of(()) == ("*",)


def test_a_file_with_controlling_tokens_only_permits_no_writing(tmp_path: Path) -> None:
    found = access(tmp_path, "boss +control\n")
    assert found.runs_of(given("other")) is None
    assert found.runs_of(given("boss")) == ()


@pytest.mark.parametrize(
    ("text", "said"), [("", "no tokens"), ("t +contrl exp\n", "line 1: word 2 is not a run")]
)
def test_lines_that_make_no_sense(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RemoteError, match=said):
        access(tmp_path, text)
