"""Files that earlier versions wrote are read as those versions read them: logs, spools, flight recordings.

A set is a folder next to this file, by `tools/make_kept_files.py`. Its texts are what the version that wrote it read. A
later version may add keys to a message's JSON, and change none but one: messages of launches that send no step have
none, where the first versions carried the step of an earlier launch over.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from collecting import CollectorProcess, forwarder
from hostcallback import receiver
from hostcallback.receiver.cli import main
from hostcallback.receiver.errors import TapFunctionException
from hostcallback.receiver.failures.check_report import CheckError
from hostcallback.receiver.sinks.scalars import scalars_into
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.reading.merge import LostNote

SETS = sorted(path.parent for path in Path(__file__).parent.glob("*/log.jsonl"))
RUN = "kept"

pytestmark = pytest.mark.parametrize("kept", SETS, ids=lambda path: path.name)


def messages(text: str) -> list[dict[str, Any]]:
    """Messages as JSON, one per line."""
    return [json.loads(line) for line in text.splitlines()]


def check_same(found: str, expected: Path) -> None:
    """Fails unless every key of every expected message is as it was, or none for a step of another launch."""
    now, before = messages(found), messages(expected.read_text())
    assert len(now) == len(before) > 0
    with_steps = {old["run_id"] for old in before if old["name"] == "metrics"}
    assert len(with_steps) == 1
    for message, old in zip(now, before, strict=True):
        # A check that failed in one iteration only, with nothing of it around, is of that or of the next one.
        is_known = old["run_id"] in with_steps and old["kind"] != "check"
        step = old["step"] if is_known else None
        assert {key: message[key] for key in old} == {**old, "step": step}


def lost(log: Path) -> list[Lost]:
    """The noted losses of a log."""
    return [record.lost for record in receiver.LogReader(log).records() if isinstance(record, LostNote)]


def test_a_log(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", "--json", str(kept / "log")]) == 0
    check_same(capsys.readouterr().out, kept / "log.jsonl")
    assert [(note.messages, note.reason) for note in lost(kept / "log")] == [(3, "dropped: no room")]


def test_a_replay(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states: list[Any] = []
    with pytest.raises(TapFunctionException) as caught, scalars_into(tmp_path / "scalars.jsonl") as scalars:
        receiver.replay(
            kept / "log", bind={"state": lambda state, run: states.append((state, run))}, sinks=[scalars]
        )
    assert any("x is 3" in str(e) for e in caught.value.exceptions if isinstance(e, CheckError))
    assert capsys.readouterr().out == (kept / "replay.txt").read_text()
    losses = [
        line["metrics/loss"]
        for line in messages((tmp_path / "scalars.jsonl").read_text())
        if "metrics/loss" in line
    ]
    assert losses == [1.0, 2.0, 3.0]
    assert [(float(state.loss), run) for state, run in states] == [(1.0, 7), (2.0, 7), (3.0, 7)]


def test_a_flight_recording(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(kept / "flights.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert main(["recover", "--json", str(tmp_path / "flights")]) == 0
    check_same(capsys.readouterr().out, kept / "recovered.jsonl")


def test_a_spool_that_a_later_process_of_its_run_sends(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept / "spool", tmp_path / "spool")
    with CollectorProcess(tmp_path, "--quiet") as collector:
        forwarder(collector.address, tmp_path / "spool", run=RUN).close()
        assert collector.stop() == 0
    assert list((tmp_path / "spool").iterdir()) == []
    assert main(["cat", "--json", str(collector.log / RUN)]) == 0
    check_same(capsys.readouterr().out, kept / "spool.jsonl")
    assert [note.messages for note in lost(collector.log / RUN)] == [3]
