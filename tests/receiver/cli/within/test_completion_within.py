"""The words that a shell is offered for a line: commands, options, files, and names of logs and of processes."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_server import PID, TAPS, Served

from hostcallback.receiver.cli import main
from hostcallback.receiver.cli.commands import completion
from hostcallback.receiver.cli.commands.completion import answer
from logged_frames import LOSS, block_of, frame, log_in

argcomplete = pytest.importorskip("argcomplete", reason="needs pip install 'hostcallback[completion]'")


class Finder(argcomplete.CompletionFinder):  # type: ignore[misc, name-defined]
    """Finds words as for a shell, and leaves descriptor 9 and this process alone."""

    def _init_debug_stream(self) -> None:
        pass


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the words that are offered at the end of a line."""

    def words(line: str) -> list[str]:
        found = io.StringIO()

        def autocomplete(parser: Any, **options: Any) -> None:
            Finder()(parser, **options, exit_method=sys.exit, output_stream=found)

        with monkeypatch.context() as patch:
            patch.setattr(argcomplete, "autocomplete", autocomplete)
            for name, value in {
                "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "|",
                "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            }.items():  # fmt: skip
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                answer()
        assert ended.value.code == 0
        return [word for word in found.getvalue().split("|") if word]

    monkeypatch.chdir(tmp_path)
    return words


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two runs in a folder: the second has a name that could command a terminal."""
    for run, names, device in (
        ("deep", ("loss", "layer0/grad"), "cpu:0"),
        ("wide", ("a\x1b]0;b\nc",), "gpu:1"),
    ):
        with log_in(tmp_path / "log", run=run) as writer:
            for number, name in enumerate(names):
                described = replace(LOSS, name=name, consumer_id=100 + number)
                writer.describe(described)
                writer.append(device, block_of(frame(described, np.float32(1), np.int32(1), seq=number)))
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hcb re", ["replay", "recover", "reproduce"]),
        ("hcb cat log --js", ["--json"]),
        ("hcb convert log --to p", ["parquet"]),
        ("hcb cat lo", ["log/"]),
        ("hcb cat log --run ", ["all", "deep", "wide"]),
        ("hcb cat log --run deep --run ", ["all", "deep", "wide"]),
        ("hcb cat log --name ", ["a?]0;b?c", "layer0/grad", "loss"]),
        ("hcb cat log --run deep --name ", ["layer0/grad", "loss"]),
        ("hcb cat log --run wide --name ", ["a?]0;b?c"]),
        ("hcb stats log --name lo", ["loss"]),
        ("hcb diff log log --name lo", ["loss"]),
        ("hcb cat log --run deep --device ", ["cpu:0"]),
        ("hcb cat log --device ", ["cpu:0", "gpu:1"]),
        ("hcb cat missing --name ", []),
        ("hcb cat --name ", []),
    ],
)  # fmt: skip
def test_what_is_offered(line: str, words: list[str], log: Path, offered: Any) -> None:
    assert sorted(word.replace("\\", "") for word in offered(line)) == sorted(words)


def test_files_are_offered_before_options_and_a_command_first(log: Path, offered: Any) -> None:
    assert {"cat", "ctl", "completion"} <= set(offered("hcb "))
    assert offered("hcb stats ") == ["log/"]
    assert {"--json", "--name", "--run"} <= set(offered("hcb stats -"))


def test_names_of_a_process_are_offered(served: Served, offered: Any) -> None:
    assert offered("hcb top ") == [PID]
    assert PID in offered("hcb ctl ")
    assert offered(f"hcb ctl {PID} ") == sorted(TAPS)
    assert offered(f"hcb ctl {PID} l") == ["layer1/grad", "loss"]
    assert offered("hcb ctl 99999999 ") == []
    assert offered("hcb ctl abc ") == []
    served.path.unlink()
    assert offered("hcb top ") == []


def test_a_long_log_is_not_searched_to_its_end(
    log: Path, offered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "PATIENCE_SEC", -1.0)
    assert len(offered("hcb cat log --name ")) in (1, 2), "the names of one segment"


def test_each_shell_gets_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for shell in ("bash", "zsh", "fish", "tcsh"):
        assert main(["completion", shell]) == 0
        shown.append(capsys.readouterr().out)
    bash, zsh, fish, tcsh = shown
    assert "complete -o nospace -o default -o bashdefault -F _python_argcomplete hcb\n" in bash
    assert bash == zsh
    assert "complete --command hcb " in fish
    assert 'complete "hcb" ' in tcsh
    assert tcsh.count("\n") == 1


def test_without_the_package_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 1
    cure = "completion needs the package argcomplete: pip install 'hostcallback[completion]'"
    assert capsys.readouterr().err == f"hcb: {cure}\n"
