"""Consumers in a collector: functions from a file, sinks, metrics."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from collecting import CHECK, LOSS, CollectorProcess, Emitter, all_stored, forwarder
from hostcallback.receiver.errors import TapLogError
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.delivery.cursor import Cursor
from hostcallback.receiver.sinks.metric_writers.files import CsvWriter, JsonlWriter
from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord
from hostcallback.receiver.sinks.scalars import ScalarsSink, scalars_into
from logged_frames import consumer_of
from threads import wait_for

NORM = replace(LOSS, name="norm", consumer_id=90, tree=["array"])

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
    assert [row["device"] for row in metrics] == ["run p0 cpu:0"] * 5 + ["run p1 cpu:0"] * 5


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


def _rows(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".csv":
        with file.open(newline="") as read:
            return [*csv.DictReader(read)]
    return [json.loads(line) for line in file.read_text().splitlines()]


def _is_stored(log: Path, count: int) -> bool:
    with contextlib.suppress(TapLogError, OSError):  # there is none yet
        return sum(map(len, all_stored(log).values())) == count
    return False


def _has_noted(log: Path, count: int) -> bool:
    # Whether the collector would go on after that many rows.
    state = Cursor(log).metrics
    return state is not None and state["lines"] + len(state.get("rows", ())) >= count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_the_file_of_metrics_has_each_row_once_after_kills_and_restarts(tmp_path: Path, name: str) -> None:
    metrics = tmp_path / name
    metrics.write_text("of another collector\n")
    with CollectorProcess(tmp_path, "--quiet", "--metrics", str(metrics)) as collector:
        assert any("another --metrics FILE keeps it" in line for line in collector.errors)
        with forwarder(collector.address, tmp_path / "spool", drain_sec=60) as recorder:
            emitter = Emitter(recorder)
            for part, end in enumerate((collector.kill, collector.stop, collector.kill)):
                emitter.losses(30)
                wait_for(lambda part=part: _has_noted(collector.log, 30 + 40 * part), "a noted position")
                emitter.losses(10)
                if part == 2:  # a column more, after the position that was noted
                    for _ in range(5):
                        emitter.emit(replace(LOSS, name="late", consumer_id=91), np.float32(7), np.int32(7))
                wait_for(lambda: _is_stored(collector.log, emitter.seq), "the messages")
                end()
                collector.start()
        assert collector.stop() == 0
    rows = _rows(metrics)
    # Independent processes of a run have no number that tells them apart.
    assert {row["device"] for row in rows} == {f"run {platform.node()}:{os.getpid()} cpu:0"}
    steps = [int(row["step"]) for row in rows if row.get("loss/loss") not in (None, "")]
    assert steps == [*range(120)]
    assert len([row for row in rows if row.get("late/loss")]) == 5


def test_a_scalar_that_is_delivered_before_the_step_of_its_launch_has_that_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with CollectorProcess(tmp_path, "--quiet", "--metrics", str(metrics)) as collector:
        with forwarder(collector.address, tmp_path / "spool", drain_sec=60) as recorder:
            for seq in range(8):
                launch, is_loss = divmod(seq, 2)
                arrays = (
                    [np.asarray(launch / 2), np.asarray(launch)] if is_loss else [np.asarray(10.0 * launch)]
                )
                described = LOSS if is_loss else NORM
                recorder(Message(consumer_of(described), arrays, seq, seq, launch + 1, "cpu:0", None))
                wait_for(lambda seq=seq: _is_stored(collector.log, seq + 1), "the message")
        assert collector.stop() == 0
    rows = _rows(metrics)
    assert [(row["step"], row["norm"]) for row in rows if "norm" in row] == [(n, 10.0 * n) for n in range(4)]


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_what_was_written_after_the_noted_state_is_taken_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    consumers = {tap.name: consumer_of(tap) for tap in (LOSS, replace(NORM, name='odd\n"name'))}
    loss, odd = consumers.values()

    def take(sink: ScalarsSink, *steps: int) -> None:
        for step in steps:
            sink(Message(loss, [np.asarray(step / 2), np.asarray(step)], 0, 0, step, "cpu:0", None))

    with scalars_into(path, devices=True, resumes=True) as sink:
        sink.open_at(None, appends=False)
        take(sink, *range(1500))  # more than may wait
        sink(Message(odd, [np.asarray(1.0)], 0, 0, 1499, "cpu:0", None))
        state = msgpack.unpackb(msgpack.packb(sink.state()))
        take(sink, *range(1500, 1600))
        sink(Message(odd, [np.asarray(2.0)], 0, 0, 1600, "cpu:0", None))  # a column more
    for _ in range(2):
        with scalars_into(path, devices=True, resumes=True) as sink:
            sink.open_at(state, appends=True)
            take(sink, *range(1500, 1510))
    rows = _rows(path)
    steps = [int(row["step"]) for row in rows if row.get("loss/loss") not in (None, "")]
    assert steps == [*range(1510)]
    assert [float(row['odd\n"name']) for row in rows if row.get('odd\n"name') not in (None, "")] == [1.0]
    for damaged in (None, {**state, "launches": 5}, {**state, "file": "another"}):
        with scalars_into(path, devices=True, resumes=True) as sink:
            sink.open_at(damaged, appends=True)
            take(sink, 7)
    assert [int(row["step"]) for row in _rows(path)[-3:]] == [7] * 3
    # Without a state, what the file had counts, too.
    before = len(_rows(path))
    with scalars_into(path, devices=True, resumes=True) as sink:
        sink.open_at(None, appends=True)
        take(sink, 8)
        state = sink.state()
    with scalars_into(path, devices=True, resumes=True) as sink:
        sink.open_at(state, appends=True)
        take(sink, 9)
    assert len(_rows(path)) == before + 2


@pytest.mark.parametrize("make", [CsvWriter, JsonlWriter])
def test_a_line_that_a_loss_of_power_cut_short_does_not_count(
    make: type[CsvWriter | JsonlWriter], tmp_path: Path
) -> None:
    path = tmp_path / "metrics"
    writer = make(path, "w")
    writer.open()
    for step in range(3):
        writer.write(MetricRecord(step, 0, {"loss": 0.5}))
    writer.flush()
    state = writer.state()
    writer.close()
    assert state["lines"] == 3
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b",")])
    later = make(path, "a")
    later.resume(state)
    assert later.state()["lines"] == 2
    later.close()
    assert path.read_bytes() == data[: data.rindex(b"\n", 0, -1) + 1]
