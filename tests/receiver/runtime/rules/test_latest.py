"""The last value of a tap with a rate always arrives: in time, at a barrier, and when the rule changes."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.runtime.rules.admission import LATEST_BYTES
from recorder import Recorder

NEVER = 1 / 3600


def counting(rec: Any, name: str, length: int) -> Any:
    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(rec, carry, name=name)
        return carry + 1, None

    return jax.jit(lambda x: lax.scan(step, x, None, length=length)[0])


def suppressed(name: str) -> int:
    return hcb.taps[name].suppressed[name]


def test_it_arrives_without_a_barrier_when_the_time_between_two_messages_is_over() -> None:
    values: list[int] = []
    arrived = threading.Event()

    def take(value: Any) -> None:
        values.append(int(value))
        if value % 50 == 49:
            arrived.set()

    hcb.taps["in time"].rate(50)
    program = counting(take, "in time", 50)
    for start in (0, 100):
        arrived.clear()
        program(start)
        assert arrived.wait(20), "the last value has not arrived"
    assert values[0] == 0
    assert values[-1] == 149
    assert values == sorted(set(values))
    hcb.barrier_wait()
    assert len(values) + suppressed("in time") == 100
    assert values[-1] == 149, "nothing is delivered twice"


def test_it_arrives_at_a_barrier_and_the_rate_holds_after_it(rec: Recorder) -> None:
    program = counting(rec, "at a barrier", 10)
    hcb.taps["at a barrier"].rate(NEVER)
    for start in (0, 100, 200):
        program(start)
    hcb.barrier_wait()
    assert rec.floats() == [0, 209]
    hcb.barrier_wait()
    program(300)
    hcb.barrier_wait()
    assert rec.floats() == [0, 209, 309]
    assert len(rec) + suppressed("at a barrier") == 40


def test_a_change_of_the_rule_sends_it_before_all_later_values(rec: Recorder) -> None:
    program = counting(rec, "changed", 10)
    hcb.taps["changed"].rate(NEVER)
    program(0).block_until_ready()
    hcb.taps["changed"].rate(None)
    program(100).block_until_ready()
    hcb.taps["changed"].rate(NEVER)
    program(200).block_until_ready()
    hcb.taps["changed"].disable()
    program(300)
    hcb.barrier_wait()
    assert rec.floats() == [0, 9, *range(100, 110), 200, 209]
    assert len(rec) + suppressed("changed") == 40


def test_each_device_and_each_tap_has_its_own() -> None:
    rec, other = Recorder(), Recorder()
    spec, length = PartitionSpec("i"), 5

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(other, carry[0] + 1000, name="own/other")
        return hcb.id_tap(rec, carry[0], name="own/one")[None] + 10, None

    body = jax.shard_map(
        lambda x: lax.scan(step, x, None, length=length)[0],
        mesh=Mesh(jax.devices(), ("i",)), in_specs=spec, out_specs=spec,
    )  # fmt: skip
    hcb.taps["own/*"].rate(NEVER)
    jax.jit(body)(jnp.arange(float(len(jax.devices()))))
    hcb.barrier_wait()
    for number, device in enumerate(jax.devices()):
        assert [float(value) for value in rec.on(device)] == [number, number + 40]
        assert [float(value) for value in other.on(device)] == [number + 1000, number + 1040]


def test_it_is_one_that_the_other_rules_let_pass_and_is_cut(rec: Recorder) -> None:
    program = counting(rec, "every third", 11)
    hcb.taps["every third"].every(3)
    hcb.taps["every third"].rate(NEVER)
    hcb.taps["every third"].truncate(2)
    program(jnp.arange(4))
    hcb.barrier_wait()
    assert [(value.tolist(), value.whole_shape) for value in rec.values] == [
        ([0, 1], (4,)),
        ([9, 10], (4,)),
    ]


def test_large_values_are_not_kept(rec: Recorder) -> None:
    program = counting(rec, "large", 5)
    hcb.taps["large"].rate(NEVER)
    for length, expected in ((LATEST_BYTES // 4, [0.0, 4.0]), (LATEST_BYTES // 4 + 1, [])):
        rec.values.clear()
        program(jnp.zeros(length, jnp.float32))
        hcb.barrier_wait()
        assert [value[0] for value in rec.values] == expected
    assert suppressed("large") == 8


def test_values_are_in_order_and_counted_while_they_come_fast(rec: Recorder) -> None:
    length, calls = 3_000, 5
    program = counting(rec, "fast", length)
    hcb.taps["fast"].rate(2_000)
    carry: Any = 0
    for _ in range(calls):
        carry = program(carry)
    hcb.barrier_wait()
    values = rec.floats()
    assert values == sorted(set(values))
    assert values[-1] == length * calls - 1
    assert len(values) + suppressed("fast") == length * calls
