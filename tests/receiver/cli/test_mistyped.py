"""Mistyped commands and options of `hcb` get a suggestion, with the usage of the right command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hostcallback
from hcb_command import hcb
from hostcallback.receiver.cli import COMMANDS, main


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        (["collct"], "usage: hcb [-h]", "Did you mean collect?"),
        (
            ["cat", "log", "--nmae", "x"],
            "usage: hcb cat ",
            "unrecognized arguments: --nmae x. Did you mean --name?",
        ),
        (["tail", "--lins=3", "log"], "usage: hcb tail ", "Did you mean --lines?"),
        (["cat"], "usage: hcb cat ", "the following arguments are required: LOG"),
        (["--verson"], "usage: hcb [-h]", "unrecognized arguments: --verson. Did you mean --version?"),
        (["cat", "log", "--step", "9:2"], "usage: hcb cat ", "got '9:2', which ends before it begins: 2:9"),
        (["ui", "log", "--port", "80000"], "usage: hcb ui ", "got '80000', expected a port up to 65535"),
        (["ui", "log", "--port", "-1"], "usage: hcb ui ", "got '-1', expected a port up to 65535"),
        (
            ["ctl", "4242", "lr", "3e-4"],
            "usage: hcb ctl ",
            "unexpected 3e-4: only set takes a name and a value: hcb ctl 4242 set lr 3e-4",
        ),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(
    arguments: list[str], usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(usage)
    assert error in told


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(f"\n    {name}" in shown.err for name in COMMANDS)
    assert "show the failed checks, by line" in shown.err


def test_a_port_above_65535_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["collect", "--listen", "localhost:70700", "--log", str(tmp_path / "log")]) == 2
    assert "expected HOST:PORT, such as localhost:7070, with a port up to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "TAPS = [print]", "TAPS = {'loss': 'print'}", "TAPS = {7: print}", "SINKS = print", "SINKS = [1]"],
)
def test_a_file_without_functions_for_taps_or_sinks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path, log = tmp_path / "my_taps.py", tmp_path / "log"
    path.write_text(text)
    log.write_text("")  # a collector that goes on ends here
    assert main(["collect", "--listen", "localhost:0", "--log", str(log), "--consumers", str(path)]) == 1
    said = "hcb: --consumers my_taps.py: expected TAPS = {name or pattern of taps: function}, or SINKS = [sink, ...]"
    assert said in capsys.readouterr().err


def test_replay_says_which_scalars_it_wrote(tmp_path: Path) -> None:
    with hostcallback.outfeed_receiver(record=tmp_path / "log"):
        for step in range(3):
            hostcallback.tap(lambda value: None, {"step": step, "loss": 0.5}, name="train")
            hostcallback.tap(lambda value: None, np.ones(3), name="array")
    result = hcb(tmp_path, "replay", "log", "--metrics", "scalars.jsonl")
    assert result.returncode == 0
    assert result.stderr == (
        "replayed 3 message(s), 3 scalar(s) are in scalars.jsonl; no function takes those of array (3): "
        "--bind NAME=WHERE:FUNCTION\n"
    )
    assert len((tmp_path / "scalars.jsonl").read_text().splitlines()) == 3
