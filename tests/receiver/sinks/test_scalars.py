"""The steps of scalars that arrive before the step of their launch."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks import scalars as scalars_sink
from hostcallback.receiver.sinks.metric_writers.files import jsonl
from hostcallback.receiver.sinks.metric_writers.reduction import NO_STEP
from hostcallback.receiver.sinks.scalars import LAUNCHES, MAX_HELD, ScalarsSink, scalars_into
from logged_frames import LOSS, NORM, consumer_of

IMAGE = replace(NORM, name="image", consumer_id=5)
CONSUMERS = {tap.name: consumer_of(tap) for tap in (LOSS, NORM, IMAGE)}


class Writer:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []
        self.flushed = 0

    def write(self, record: Any) -> None:
        self.rows.extend((record.step, value) for value in record.scalars.values())

    def flush(self) -> None:
        """Notes how many rows there are."""
        self.flushed = len(self.rows)

    def take(self) -> list[tuple[int, float]]:
        """The rows since the last call, as step and value."""
        rows, self.rows = self.rows, []
        return rows


def sink_into(writer: Writer) -> ScalarsSink:
    return ScalarsSink(writer, waits=True)  # type: ignore[arg-type]


def take(sink: ScalarsSink, launch: int, *arrays: Any) -> None:
    """A message of `loss` with its step, or of `norm`."""
    name = "image" if np.ndim(arrays[0]) else "loss" if len(arrays) == 2 else "norm"
    sink(Message(CONSUMERS[name], list(map(np.asarray, arrays)), 0, 0, launch, "cpu:0", None))


def test_a_scalar_without_a_step_waits_for_the_end_of_its_launch_and_no_longer() -> None:
    writer = Writer()
    sink = sink_into(writer)
    take(sink, 1, 0.1)
    take(sink, 1, 0.2, 10)
    take(sink, 2, 0.3)
    take(sink, 2, 0.4, 11)
    take(sink, 2, 0.5)
    take(sink, 3, 0.6, 12)
    assert writer.take() == [(10, 0.2), (11, 0.4), (12, 0.6)]  # each may have several steps
    take(sink, 4, 0.7)
    assert writer.take() == [(10, 0.1), (11, 0.3), (11, 0.5)]  # the first one is over, and had one
    take(sink, 4, 0.8, 13)
    assert writer.take() == [(13, 0.8), (13, 0.7)]
    take(sink, 0, 0.9)  # of an unknown launch
    assert writer.take() == [(NO_STEP, 0.9)]
    take(sink, 5, 1.0)
    take(sink, 5, 1.1, 14)
    take(sink, 5, 1.2, 15)
    take(sink, 5, 1.3)
    assert writer.take() == [(14, 1.1), (14, 1.0), (15, 1.2), (NO_STEP, 1.3)]
    take(sink, 6, 1.4, 16)
    take(sink, 6, 1.5)
    assert writer.take() == [(16, 1.4)]  # a launch of that tap had several
    sink.finish()
    assert writer.take() == [(16, 1.5)]
    for _ in range(MAX_HELD + 1):
        take(sink, 7, 1.6)
    assert writer.take() == [(NO_STEP, 1.6)] * (MAX_HELD + 1)


def test_launches_that_overlap_keep_their_steps() -> None:
    writer = Writer()
    sink = sink_into(writer)
    take(sink, 2, 0.3)
    take(sink, 1, 0.9)
    take(sink, 2, 0.4, 11)
    take(sink, 1, 0.8, 10)
    sink.finish()
    assert sorted(writer.take()) == [(10, 0.8), (10, 0.9), (11, 0.3), (11, 0.4)]


def test_messages_without_a_scalar_end_no_launch() -> None:
    writer = Writer()
    sink = sink_into(writer)
    take(sink, 1, 0.3)
    for launch in range(2, 10):
        take(sink, launch, np.zeros(3))
    take(sink, 1, 0.4, 11)
    assert len(sink._launches["cpu:0"]) == 1
    sink.finish()
    assert writer.take() == [(11, 0.4), (11, 0.3)]


def test_a_part_of_a_launch_of_several_steps_does_not_look_like_one_of_one_step() -> None:
    writer = Writer()
    sink = sink_into(writer)
    take(sink, 1, 0.1, 10)
    take(sink, 2, 0.2, 20)
    take(sink, 1, 0.3)  # of the next iteration
    assert writer.take() == [(10, 0.1), (20, 0.2)]
    take(sink, 1, 0.4, 11)
    assert writer.take() == [(11, 0.4), (NO_STEP, 0.3)]


def test_scalars_do_not_wait_for_their_step_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    sink = sink_into(writer)
    for launch in range(1, LAUNCHES):
        take(sink, launch, launch / 10)
    take(sink, LAUNCHES, 0.9, 10)
    take(sink, LAUNCHES, 0.8)
    writer.take()
    sink.release_waiting()
    assert writer.take() == []
    assert not writer.flushed
    monkeypatch.setattr(scalars_sink, "WAIT_SEC", 0.0)
    sink.release_waiting()
    assert writer.flushed == LAUNCHES  # also of a file whose rows wait for others of their step
    # The last launch may still go on, with another step.
    assert writer.take() == [*((NO_STEP, launch / 10) for launch in range(1, LAUNCHES)), (NO_STEP, 0.8)]
    take(sink, LAUNCHES, 0.7)
    take(sink, LAUNCHES + 1, 0.6)
    sink.release_waiting()
    assert writer.take() == [(10, 0.7), (NO_STEP, 0.6)]
    monkeypatch.setattr(scalars_sink, "FORGET_SEC", 0.0)
    sink.release_waiting()
    assert not sink._launches


@pytest.mark.parametrize("how", ["taken", "released", "finished"])
def test_a_record_that_cannot_be_written_costs_no_record_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    odd = consumer_of(replace(NORM, name="\udc80", consumer_id=6))  # UTF-8 has no lone surrogate
    writer = jsonl(tmp_path / "metrics.jsonl")
    writer.open()
    sink = ScalarsSink(writer, waits=True)
    sink(Message(odd, [np.asarray(0.5)], 0, 0, 1, "cpu:0", None))
    take(sink, 1, 0.1)
    take(sink, 2, 0.2)
    take(sink, 2, 0.3)
    monkeypatch.setattr(scalars_sink, "WAIT_SEC", 0.0)
    for launch in range(3, LAUNCHES + 1):
        take(sink, launch, 0.4)
    write = {
        "taken": lambda: take(sink, LAUNCHES + 1, 0.5),
        "released": sink.release_waiting,
        "finished": sink.finish,
    }
    with pytest.raises(UnicodeEncodeError):
        write[how]()
    writer.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    kept = [0.1] if how == "taken" else [0.1, 0.2, 0.3, 0.4]
    assert [json.loads(line)["norm"] for line in lines] == kept


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_metrics_called_as_other_columns_have_columns_too(tmp_path: Path, name: str) -> None:
    with scalars_into(tmp_path / name, devices=True) as sink:
        for called, value in (("device", 0.5), ("step", 1.5)):
            sink(
                Message(consumer_of(replace(NORM, name=called)), [np.asarray(value)], 0, 0, 1, "cpu:0", None)
            )
    text = (tmp_path / name).read_text()
    rows = [*csv.DictReader(text.splitlines())]
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in text.splitlines()]
    assert [row["device"] for row in rows] == ["cpu:0"] * 2
    assert [row["step"] or None for row in rows] == [None] * 2
    assert (float(rows[0]["device_value"]), float(rows[1]["step_value"])) == (0.5, 1.5)
