"""The file of metrics of a collector: what it has while the collector runs, after a clean end, and if it fails."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from collecting import LOSS, Emitter, forwarder, wait_for
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery import delivery as delivering, process_groups
from hostcallback.receiver.remote.delivery.cursor import Cursor
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.sinks import scalars as scalars_sink
from hostcallback.receiver.sinks.scalars import ScalarsSink, scalars_into
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from logged_frames import consumer_of

NORM = replace(LOSS, name="norm", consumer_id=90, tree=["array"])


class Collected:
    """A process's messages, which are stored as a collector does, and the collector's delivery."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder, self.file = folder, file
        self.got: list[int] = []
        self._recorder = forwarder("localhost:1", folder / "spool", drain_sec=0.0)
        (self._spool,) = (folder / "spool").iterdir()
        self.emitter = Emitter(self._recorder)
        key = StreamKey.of_folder(self._spool.name)
        assert key is not None
        self.key = key

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.folder / "log")

    @contextmanager
    def delivering(self) -> Iterator[ScalarsSink]:
        with scalars_into(self.file, devices=True, resumes=True) as sink:
            self.store = Store(self.folder / "log")
            self.delivery = Delivery(
                self.store, sinks=[self._take], prints=False, everything=True, metrics=sink
            )
            yield sink
            self.delivery.close(10)
            assert not self.delivery._thread.is_alive()
            self.store.close()

    def _take(self, message: Message) -> None:
        self.got.append(message.seq)

    def deliver(self) -> None:
        """Stores what was emitted, and waits until it is delivered."""
        self._recorder.flush()
        data = (self._spool / "000001.hcblog").read_bytes()
        stream = self.store.open(self.key)
        stream.append(StreamOffset(1, stream.stored.offset), data[stream.stored.offset :])
        self.delivery.grown(self.key, stream.stored)
        self.store.forget(self.key)
        wait_for(lambda: len(self.got) >= self.emitter.seq, "the messages", 10)

    def norms(self, count: int) -> None:
        """Delivers scalars without a step."""
        for _ in range(count):
            self.emitter.emit(NORM, np.float32(self.emitter.seq))
        self.deliver()

    def emit(self, described: TapDescriptor, run_id: int, *arrays: Any) -> None:
        """Emits a message of a launch, in a chunk that has no other."""
        seq, now = self.emitter.seq, time.time_ns()
        self._recorder(Message(consumer_of(described), arrays, seq, now, run_id, "cpu:0", None))
        self._recorder.flush()
        self.emitter.seq += 1

    def close(self) -> None:
        """Ends the process."""
        self._recorder.close()

    def rows(self) -> int:
        return len(self.file.read_text().splitlines())


@pytest.fixture
def collect(tmp_path: Path) -> Iterator[Callable[[str], Collected]]:
    """Makes a process whose collector writes a file of metrics of this name."""
    with ExitStack() as stack:

        def make(name: str) -> Collected:
            collected = Collected(tmp_path, tmp_path / name)
            stack.callback(collected.close)
            return collected

        yield make


@pytest.mark.parametrize("error", [ValueError("closed"), OSError(28, "No space left on device")])
def test_a_file_that_fails_ends_no_delivery(
    collect: Callable[[str], Collected],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(delivering, "SAVE_SEC", 0.02)

    def fail(*args: object) -> NoReturn:
        raise error

    collected = collect("metrics.jsonl")
    with collected.delivering() as sink:
        collected.emitter.losses(3)
        collected.deliver()
        before = wait_for(lambda: (state := collected.cursor.metrics) and state["lines"] == 3 and state)
        with caplog.at_level(logging.WARNING), monkeypatch.context() as failing:
            failing.setattr(sink, "state", fail)
            failing.setattr(sink._writer, "write", fail)
            capsys.readouterr()
            for _ in range(3):
                noted = collected.cursor.position(collected.key)
                collected.emitter.losses(2)
                collected.deliver()
                wait_for(lambda at=noted: collected.cursor.position(collected.key) > at, "a saved cursor", 10)
            assert collected.cursor.metrics == before
            assert capsys.readouterr().out.count("train.py:12") == 6
        collected.emitter.losses(2)
        collected.deliver()
    assert caplog.text.count("the file of metrics cannot be written") == 1
    assert collected.cursor.metrics["lines"] == 5


def test_the_name_of_the_file_need_not_be_utf_8(collect: Callable[[str], Collected]) -> None:
    collected = collect(os.fsdecode(b"metrics\xff.csv"))
    for count in (3, 4):
        with collected.delivering():
            assert not collected.got or collected.rows() == 4
            collected.emitter.losses(count)
            collected.deliver()
    assert collected.rows() == 8
    assert collected.cursor.metrics["file"] == str(collected.file)


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_scalars_of_launches_without_a_step_are_written_while_the_collector_runs(
    collect: Callable[[str], Collected], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivering, "SAVE_SEC", 0.02)
    monkeypatch.setattr(scalars_sink, "WAIT_SEC", 0.1)
    monkeypatch.setattr(scalars_sink, "FORGET_SEC", 0.2)
    collected = collect(name)
    header = name.endswith(".csv")
    with collected.delivering() as sink:
        for round_ in range(1, 3):
            collected.norms(5)
            wait_for(lambda count=5 * round_: collected.rows() == header + count, "the rows", 10)
        wait_for(lambda: not sink.state()["launches"], "a forgotten launch", 10)


def test_scalars_wait_for_a_step_that_is_stored_and_not_yet_delivered(
    collect: Callable[[str], Collected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivering, "SAVE_SEC", 0.0)
    monkeypatch.setattr(process_groups, "TURN_BYTES", 1)
    monkeypatch.setattr(scalars_sink, "WAIT_SEC", 0.0)
    collected = collect("metrics.jsonl")
    with collected.delivering():
        # Of four launches that have one step each, it is known of the fifth.
        for run in range(1, 6):
            collected.emit(LOSS, run, np.float32(run), np.int32(run))
        collected.emit(NORM, 9, np.float32(0.5))
        collected.emit(LOSS, 9, np.float32(9), np.int32(9))
        collected.deliver()
    rows = list(map(json.loads, collected.file.read_text().splitlines()))
    assert [row.get("step") for row in rows if "norm" in row] == [9]


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_a_restart_after_a_clean_end_takes_nothing_out(
    collect: Callable[[str], Collected], name: str
) -> None:
    collected = collect(name)
    header = name.endswith(".csv")
    for before in (0, 5):
        with collected.delivering():
            assert not before or collected.rows() == header + before
            collected.norms(5)
    assert collected.rows() == header + 10
