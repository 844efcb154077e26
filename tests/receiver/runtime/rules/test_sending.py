"""Messages that rules let through, of compiled programs: every n-th, at most a number per second; the counts."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import Jit


def scan(jit: Jit, rec: Recorder, name: str, length: int = 10) -> Any:
    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(rec, carry, name=name)
        return carry + 1, None

    return jit(lambda x: lax.scan(step, x, None, length=length)[0])


def test_every_nth_message_is_sent_over_all_calls(rec: Recorder) -> None:
    program = scan(jax.jit, rec, "every nth")
    program(0.0)
    hcb.barrier_wait()
    assert len(rec) == 10
    before = hcb.taps["every nth"].suppressed["every nth"]
    assert hcb.taps["every*"].every(4) == ["every nth"]
    for start in (100.0, 200.0):
        program(start)
    hcb.barrier_wait()
    assert rec.floats()[10:] == [100, 104, 108, 202, 206]
    assert hcb.taps["every nth"].suppressed["every nth"] == before + 15
    hcb.taps["every nth"].every(1)
    program(0.0)
    hcb.barrier_wait()
    assert len(rec) == 25


def test_nothing_is_dropped_and_no_number_is_spent(rec: Recorder) -> None:
    program = scan(hcb.jit, rec, "no gap")
    hcb.taps["no gap"].every(3)
    with hcb.outfeed_receiver() as rx:
        program(0.0)
    (row,) = [row for row in rx.stats if row.delivered]
    assert (row.delivered, row.dropped, row.unknown) == (4, 0, 0)


def test_a_rate_limits_messages_and_not_programs(rec: Recorder) -> None:
    program = scan(hcb.jit, rec, "at most", 1000)
    hcb.taps["at most"].rate(1 / 3600)
    program(0.0)
    hcb.barrier_wait()
    assert rec.floats() == [0, 999]
    hcb.taps["at most"].rate(None)
    program(0.0)
    hcb.barrier_wait()
    assert len(rec) == 1002


def test_each_device_counts_separately(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")

    def step(carry: Any, _: Any) -> Any:
        return hcb.id_tap(rec, carry, name="on each") + 10, None

    body = jax.shard_map(
        lambda x: lax.scan(step, x, None, length=5)[0], mesh=mesh, in_specs=spec, out_specs=spec
    )
    hcb.taps["on each"].every(2)
    hcb.jit(body)(jnp.arange(4.0))
    hcb.barrier_wait()
    for number, device in enumerate(jax.devices()):
        assert [float(value[0]) for value in rec.on(device)] == [number, number + 20, number + 40]


def test_a_rule_holds_for_taps_to_come_and_later_ones_win(
    caplog: pytest.LogCaptureFixture, rec: Recorder
) -> None:
    with caplog.at_level(logging.WARNING):
        assert hcb.taps["to come*"].every(5) == []
    assert "no tap is called 'to come*' so far" in caplog.text
    program = scan(hcb.jit, rec, "to come/1")
    program(0.0)
    hcb.barrier_wait()
    assert rec.floats() == [0, 5]
    assert hcb.taps["to come/1"].every(2) == ["to come/1"]
    assert hcb.taps.rules == {"to come*": "every=5", "to come/1": "every=2"}
    assert repr(hcb.taps["to come*"]) == "<taps['to come*']: to come/1 (every=2)>"
    hcb.taps["*"].reset()
    assert hcb.taps.rules == {}
    program(0.0)
    hcb.barrier_wait()
    assert len(rec) == 12


def test_a_tap_that_is_off_counts_its_suppressed_messages(rec: Recorder) -> None:
    program = scan(hcb.jit, rec, "counted while off")
    program(0.0)
    hcb.taps["counted*"].disable()
    program(0.0)
    hcb.barrier_wait()
    assert hcb.taps["counted*"].suppressed == {"counted while off": 10}


def test_checks_take_no_rule_that_would_hide_failures(caplog: pytest.LogCaptureFixture) -> None:
    program = hcb.jit(lambda x: hcb.check(x > 0, "is {}", x, name="always checked"))
    program(1.0)
    with caplog.at_level(logging.WARNING):
        assert hcb.taps["always checked"].every(2) == []
    assert "'always checked' matches checks only" in caplog.text
    for _ in range(3):
        program(-1.0)
    with pytest.raises(hcb.TapFunctionException) as raised:
        hcb.barrier_wait()
    (error,) = raised.value.exceptions
    assert isinstance(error, hcb.CheckError)
    assert error.check.count == 3


def test_a_setting_that_makes_no_sense_changes_nothing() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        hcb.taps["*"].every(0)
    assert hcb.taps.rules == {}
