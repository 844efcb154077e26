"""Consumers in a collector: functions from a file, sinks, metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from collecting import CHECK, CollectorProcess, Emitter, forwarder
from hostcallback.receiver.cli import main

CONSUMERS = """
def take(value, *, device):
    if value["step"] == 3:
        raise ValueError(f"step {value['step']}")
    print("took", float(value["loss"]), device)

def count(message):
    global messages
    messages += 1
    print("message", messages, message.consumer.name)

messages = 0
TAPS = {PATTERN: take}
SINKS = [count]
"""


def _consumers(folder: Path, pattern: str) -> str:
    path = folder / "my_taps.py"
    path.write_text(CONSUMERS.replace("PATTERN", repr(pattern)))
    return str(path)


def test_functions_and_sinks_in_a_file_get_the_messages_of_all_processes(tmp_path: Path) -> None:
    given = (
        "--quiet",
        "--consumers",
        _consumers(tmp_path, "lo*"),
        "--metrics",
        str(tmp_path / "metrics.jsonl"),
    )
    with CollectorProcess(tmp_path, *given) as collector:
        for process in (0, 1):
            with forwarder(collector.address, tmp_path / "spool", process_index=process) as recorder:
                Emitter(recorder).losses(5)
        assert collector.stop() == 0
    for process in (0, 1):
        took = [line for line in collector.lines if line.endswith(f"run p{process} cpu:0\n")]
        assert took == [f"took {step}.0 run p{process} cpu:0\n" for step in (0, 1, 2, 4)]
    counted = [line for line in collector.lines if line.startswith("message")]
    assert counted == [f"message {number} loss\n" for number in range(1, 11)]
    raised = [line for line in collector.errors if "ValueError: step 3" in line]
    assert len(raised) == 2
    assert all("train.py:12" in line for line in raised)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4] * 2


def test_a_pattern_takes_no_failed_check_away_from_the_table(tmp_path: Path) -> None:
    given = ("--quiet", "--consumers", _consumers(tmp_path, "*"))
    with CollectorProcess(tmp_path, *given) as collector:
        with forwarder(collector.address, tmp_path / "spool") as recorder:
            emitter = Emitter(recorder)
            emitter.losses(1)
            emitter.emit(CHECK, np.bool_(False), np.float32(-1.0))
        assert collector.stop() == 0
    assert "took 0.0 run p0 cpu:0\n" in collector.lines
    assert "message 2 positive\n" in collector.lines
    assert "x is -1.0" in "".join(collector.errors)


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
