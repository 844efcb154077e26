"""The newcomer's questions have answers that run, one click from the README; the steps of the tutorial run too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkout import ROOT
from plugin_pytest import run_pytest
from python_process import python_output

PAGE = ROOT / "docs" / "questions.md"
ANSWERS = {
    question: re.findall(r"```python\n(.*?)```", answer, re.DOTALL)
    for question, answer in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
}
TOPICS = (
    "every N-th step", "one process", "failing tap", "TensorBoard or W&B", "Jupyter", "pytest", "progress bar",
    "size of a log", "NaN", "debug", "two messages", "later", "mute",
)  # fmt: skip

ALL_IN_ONE_PROCESS = """
import sys
for number, file in enumerate(sys.argv[1:]):
    print(f"---- {file}", flush=True)
    exec(compile(open(file).read(), file, "exec"), {"__name__": "__main__"})
    import hostcallback
    hostcallback.barrier_wait()  # as at the end of a cell
    hostcallback.taps["*"].reset()
    sys.stdout.flush()
"""
"""Runs programs one after another: JAX is imported once."""


TUTORIAL = ROOT / "docs" / "tutorial.md"


def run_in_one_process(programs: dict[str, str], folder: Path) -> None:
    """Runs programs, and compares what each prints with its comments."""
    for name, code in programs.items():
        (folder / name).write_text(code)
    output = python_output("-c", ALL_IN_ONE_PROCESS, *programs, cwd=folder, timeout_sec=110)
    printed = dict(re.findall(r"^---- (\S+)\n(.*?)(?=^---- |\Z)", output, re.MULTILINE | re.DOTALL))
    for name, code in programs.items():
        assert printed[name].splitlines() == re.findall(r"# prints: (.*)", code), name


@pytest.mark.slow
def test_the_five_steps_of_the_tutorial_run_and_print_what_they_say(tmp_path: Path) -> None:
    steps = re.findall(r"^## (\d)\. .*?```python\n(.*?)```", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert [number for number, _ in steps] == ["1", "2", "3", "4", "5"]
    run_in_one_process({f"step{number}.py": code for number, code in steps}, tmp_path)


def test_there_is_an_answer_to_each_question() -> None:
    assert len(ANSWERS) == len(TOPICS)
    for question, topic in zip(ANSWERS, TOPICS, strict=True):
        assert topic in question
        assert len(ANSWERS[question]) == 1
    assert "(docs/questions.md)" in (ROOT / "README.md").read_text().split("## Use it")[0]


@pytest.mark.slow
def test_the_answers_run_and_print_what_they_say(tmp_path: Path) -> None:
    programs = {f"answer{n}.py": blocks[0] for n, blocks in enumerate(ANSWERS.values())}
    tests = [name for name, code in programs.items() if code.startswith("# test_taps.py")]
    run_in_one_process({name: code for name, code in programs.items() if name not in tests}, tmp_path)


@pytest.mark.slow
def test_the_answer_about_pytest_is_a_test_that_passes(tmp_path: Path) -> None:
    (code,) = (blocks[0] for blocks in ANSWERS.values() if "def test_" in blocks[0])
    (tmp_path / "test_taps.py").write_text(code)
    assert "1 passed" in run_pytest(tmp_path, "-q", "test_taps.py")
