"""The commands of docs/capsules.md do what it says, on the capsule of its first example."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import hostcallback as hcb
from checkout import ROOT
from hostcallback.receiver.cli import main

pytestmark = pytest.mark.native_only

DOCUMENT = (ROOT / "docs" / "capsules.md").read_text("utf-8")
COMMANDS = re.findall(r"^    hcb (reproduce .*?) *(?:#.*)?$", DOCUMENT, re.MULTILINE)
SHOWN = {
    "reproduce FILE": "reproduced: check at ",
    "reproduce FILE --show": "train_step failed: check on cpu:0",
    "reproduce FILE --python again.py": "wrote again.py",
    "reproduce FILE --breakpoint": "stopped at operation ",
    "reproduce FILE --bind loss=train:on_loss": "train.on_loss got 7.0",
    "reproduce FILE --bisect": "no operation differs: ",
    "reproduce FILE --bisect device:1": "no operation differs: ",
    "reproduce FILE --bisect /other/venv/bin/python": "no operation differs: ",
}


def starts_an_interpreter(command: str) -> bool:
    return "/other/" in command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first example ran."""
    folder = tmp_path_factory.mktemp("documented")
    code = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[0]
    (folder / "example.py").write_text(code)
    (folder / "train.py").write_text("def on_loss(loss):\n    print(f'train.on_loss got {loss:.1f}')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path("example.py")
    return folder


def test_each_documented_command_is_tested() -> None:
    assert list(SHOWN) == COMMANDS


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if starts_an_interpreter(command) else ())
        for command in SHOWN
    ],
)
def test_a_documented_command_shows_what_the_document_says(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(prompt: str = "") -> Any:
        raise EOFError

    (path,) = (folder / "capsules").glob("*.hcb")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", end)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    status = main(
        shlex.split(command.replace("FILE", str(path)).replace("/other/venv/bin/python", sys.executable))
    )
    monkeypatch.delitem(sys.modules, "train", raising=False)
    captured = capsys.readouterr()
    assert SHOWN[command] in captured.out
    assert status == 0, captured.err
    if "--python" in command:
        with pytest.raises(hcb.TapFunctionException, match=r"the loss is 7\.0"):
            runpy.run_path("again.py")
