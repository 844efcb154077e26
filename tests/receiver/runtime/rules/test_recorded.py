"""Rules in a log: truncated messages are read as heads, and the taps that rules thin out are noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.wire.truncation import head_of


def test_heads_are_recorded_and_read_as_heads(tmp_path: Path) -> None:
    seen: list[Any] = []

    def body(step: Any, x: Any) -> Any:
        hcb.id_tap(seen.append, {"step": step, "x": x}, name="heads in a log")
        return x + 1

    program = hcb.jit(lambda x: lax.fori_loop(0, 30, body, x))
    with hcb.outfeed_receiver(record=tmp_path / "log"):
        program(jnp.arange(20.0).reshape(4, 5))
        hcb.taps["heads in a log"].truncate(3)
        program(jnp.arange(20.0).reshape(4, 5))
    found = list(LogReader(tmp_path / "log").messages())
    assert [message.step for message in found] == [*range(30), *range(30)]
    for message, value in zip(found, seen, strict=True):
        logged = message.value["x"]
        assert str(logged) == str(value["x"])
    assert found[-1].value["x"].whole_shape == (4, 5)
    assert not isinstance(found[0].value["x"], hcb.TruncatedArray)


def test_a_recorder_as_a_sink_keeps_heads(tmp_path: Path) -> None:
    consumer = Consumer(5, "sunk", "here.py:1", lambda message: None)
    stack = head_of(np.arange(6.0).reshape(2, 3), (7, 9))
    with hcb.record(tmp_path / "log") as recorder:
        recorder(Message(consumer, [head_of(np.arange(3.0), (7, 9)), np.array(1)], 0, 1, 2, "cpu:0", None))
        recorder(Message(consumer, [stack], 2, 1, 2, "cpu:0", None, 2))
    arrays = [message.message.arrays for message in LogReader(tmp_path / "log").messages()]
    assert [str(a[0]) for a in arrays] == [
        "first 3 of (7, 9): [0. 1. 2.]",
        "first 3 of (7, 9): [0. 1. 2.]",
        "first 3 of (7, 9): [3. 4. 5.]",
    ]
    assert arrays[0][1] == 1


def test_stats_show_which_taps_rules_thinned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(step: Any, x: Any) -> Any:
        hcb.id_tap(lambda step: None, step, name="thinned")
        hcb.id_tap(lambda step: None, step, name="switched off")
        hcb.id_tap(lambda step: None, step, name="whole")
        return x

    def stats(log: Path) -> list[str]:
        main(["stats", str(log)])
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("rules ")]

    program = hcb.jit(lambda x: lax.fori_loop(0, 30, body, x))
    try:
        hcb.taps["thinned"].every(10)  # before the tap is traced
        with hcb.outfeed_receiver(record=tmp_path / "log"):
            program(1.0)
            hcb.taps["switched off"].disable()
            program(1.0)
            hcb.barrier_wait()
            killed = LogReader(tmp_path / "log").thinned()  # of a program that is killed now
        with hcb.outfeed_receiver(record=tmp_path / "later"):
            hcb.taps["*"].reset()
            program(1.0)
    finally:
        hcb.taps["*"].reset()
    assert [tap.rules for tap in killed.values()] == ["enabled=false", "every=10"]
    assert stats(tmp_path / "log") == [
        "rules thinned switched off, enabled=false: 30 message(s) suppressed",
        "rules thinned thinned, every=10: 54 message(s) suppressed",
    ]
    assert stats(tmp_path / "later") == []


def test_rules_set_before_the_log_began_are_in_it_though_the_program_dies(tmp_path: Path) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(lambda x: None, x, name="thinned before"))
    try:
        hcb.taps["thinned before"].every(3)
        program(1.0)
        with hcb.outfeed_receiver(record=tmp_path / "log"):
            program(1.0)
            hcb.barrier_wait()
            (tap,) = LogReader(tmp_path / "log").thinned().values()  # of a program that is killed now
    finally:
        hcb.taps["*"].reset()
    assert (tap.name, tap.rules) == ("thinned before", "every=3")
