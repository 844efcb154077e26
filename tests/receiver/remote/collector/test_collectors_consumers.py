"""Consumers in a collector: functions from a file, sinks, metrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from collecting import CHECK, CollectorProcess, Emitter, forwarder

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
