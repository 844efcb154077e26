"""The story of docs/story.md is what its program does: the NaN, where it comes from, the failure again, the fix."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT))

from tools.website import story

PAGE = story.PAGE.read_text(encoding="utf-8")


def blocks(page: str) -> dict[str, str]:
    """The parts of the page that a run writes."""
    return {found[2]: found[0] for found in story.BLOCK.finditer(page)}


def without_numbers(text: str) -> str:
    """The words of an output: another version of JAX rounds otherwise."""
    return re.sub(r"-?\d+(\.\d+)?", "N", text)


def test_the_lines_that_the_story_adds_are_those_on_the_page() -> None:
    for act in story.EDITS:
        assert f"```diff\n{story.diff(act)}\n```" in blocks(PAGE)[f"{act}_lines"]
        assert story.edited(act) != story.edited("first")


def test_the_pictures_are_there_for_light_and_dark() -> None:
    for name, *_ in story.PICTURES:
        assert f"(images/{name}.png)" in PAGE
        assert (story.IMAGES / f"{name}.png").exists()
        assert (story.IMAGES / f"{name}-dark.png").exists()


@pytest.mark.slow
def test_the_story_happens_as_it_is_told(tmp_path: Path) -> None:
    shown = story.acts(tmp_path)
    told = blocks(story.filled(PAGE, shown))
    for act, text in blocks(PAGE).items():
        if act in ("reproduced", "watched"):
            assert without_numbers(told[act]) == without_numbers(text)
    line = story.edited("first").splitlines().index(story.LOSS.splitlines()[1]) + 1
    found = re.search(
        rf"watched operation log at train\.py:{line} \(loss_fn\).* call (\d+) of step", shown["watched"]
    )
    assert found
    losses = dict(re.findall(r"step (\d+): loss (\S+)", shown["first"]))
    assert "nan" in losses.values()
    assert all((loss == "nan") == (int(step) >= int(found[1])) for step, loss in losses.items())
    assert f"reproduced: nonfinite log at train.py:{line} (loss_fn)" in shown["reproduced"]
    assert "nan" not in shown["fixed"]
    assert "watched operation" not in shown["fixed"]
