"""Commands that read the messages of one launch of a program, by the name that reports show."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hcb_command import hcb
from hostcallback import receiver
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.messages import Message
from hostcallback.receiver.taplog.writing.recorder import record
from logged_frames import BEGIN_NS, LOSS, consumer_of

CHECK = replace(
    LOSS, name="positive", consumer_id=79, kind="check", kwargs={}, transforms=(),
    tree=["tuple", [["array"], ["tuple", [["array"]]], ["dict", [], []]]],
    params={"fmt": "x = {}", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip
FIRST, SECOND, THIRD = 0x12C2DB94, -0x3D246C, 7
NAME = "c2db94"
"""Of the first launch and the second."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of each launch a loss with a step and a failed check without one; the first comes twice, the last is unknown."""
    with record(tmp_path / "log") as recorder:
        launches = (FIRST, SECOND, THIRD, FIRST, 0)
        for seq, run_id in enumerate(run_id for run_id in launches for _ in range(2)):
            arrays = (np.bool_(False), np.float32(run_id)) if seq % 2 else (np.float32(1), np.int32(1))
            consumer = consumer_of(CHECK if seq % 2 else LOSS)
            recorder(Message(consumer, arrays, seq, BEGIN_NS + seq, run_id, "cpu:0", None))
        recorder.note_exception(TapFailure(ValueError(), "f", "train.py:8 (step)", "cpu:0", 0))
    return tmp_path / "log"


def objects(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_launch_is_chosen_by_its_name_or_its_number(tmp_path: Path, log: Path) -> None:
    shown = objects(hcb(tmp_path, "cat", "--json", log))
    assert [item["launch"] for item in shown] == [*[NAME] * 4, *["000007"] * 2, *[NAME] * 2, *[None] * 2]
    for command in ("cat", "tail"):
        for given, seqs in ((NAME.upper(), [0, 1, 2, 3, 6, 7]), (SECOND, [2, 3])):
            chosen = objects(hcb(tmp_path, command, "--json", f"--launch={given}", log))
            assert [item["seq"] for item in chosen] == seqs
    counts = objects(hcb(tmp_path, "stats", "--json", "--launch", "7", log))
    assert [(item["name"], item["messages"]) for item in counts] == [("loss", 1), ("positive", 1)]
    assert json.loads(hcb(tmp_path, "replay", "--json", "--launch", "7", log).stdout)["failed_checks"] == 1
    hcb(tmp_path, "convert", "--to", "npz", "--launch", "7", "-o", "found.npz", log)
    with np.load(tmp_path / "found.npz") as found:
        assert {len(found[name]) for name in found if name.endswith("step")} == {1}


def test_the_launch_of_a_report_finds_its_failures(tmp_path: Path, log: Path) -> None:
    assert f", launch {NAME}\n" in hcb(tmp_path, "errors", log).stdout
    (check,) = objects(hcb(tmp_path, "errors", "--json", "--launch", NAME, log))
    assert (check["count"], check["first"]["launch"], check["last"]["launch"]) == (3, NAME, NAME)


def test_a_message_of_a_chosen_launch_has_the_step_of_the_launch(log: Path) -> None:
    chosen = receiver.Selection(names=("positive",), launch="7")
    assert [logged.step for logged in receiver.LogReader(log).messages(chosen)] == [1]


@pytest.mark.parametrize("command", ["cat", "tail", "stats", "errors", "replay"])
def test_a_launch_that_the_log_does_not_have(tmp_path: Path, log: Path, command: str) -> None:
    result = hcb(tmp_path, command, "--launch", "c2db95", log)
    assert result.returncode == 1
    assert "hcb: the log has no messages of a launch c2db95; hcb cat --json shows the launch" in result.stderr
    there = hcb(tmp_path, command, "--launch", NAME, "--name", "loss", "--step", "9", log)
    assert there.returncode == 0
    text = "no message is of these steps: the log has step 1, of these taps and devices, of launch c2db94\n"
    assert text in there.stderr


def test_a_launch_in_python_is_refused_as_in_commands(log: Path) -> None:
    losses: list[Message] = []
    receiver.replay(log, sinks=[losses.append], names="loss", launch=str(SECOND))
    assert [message.run_id for message in losses] == [SECOND]
    with pytest.raises(ValueError, match="got 'loss', expected a launch as reports show it, such as c2db94"):
        receiver.replay(log, launch="loss")
