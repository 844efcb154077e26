"""`when`: a tap is delivered only if a predicate held for the message before it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder


def test_a_message_comes_only_if_the_predicate_held_for_the_one_before(rec: Recorder) -> None:
    asked: list[float] = []

    def is_small(value: Any) -> bool:
        asked.append(float(value))
        return asked[-1] < 3

    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="small"))
    hcb.taps["small"].when(is_small, probe_every=4, probe_sec=0)
    # One at a time, so that the device knows each answer before the next message.
    for value in (0, 1, 5, 6, 7, 8, 2, 9, 1, 1, 1, 0, 1):
        program(float(value))
        hcb.barrier_wait()
    # 5 was delivered, since 1 is small. 5 is not, so the gate closes: one message in four is a probe.
    assert asked == [0, 1, 5, 2, 9, 0, 1]
    assert rec.floats() == [0, 1, 5, 9, 1]
    assert hcb.taps["small"].suppressed == {"small": 8}
    hcb.taps["small"].when(None)
    program(100.0)
    program(101.0)
    hcb.barrier_wait()
    assert rec.floats()[5:] == [100, 101]


def test_one_message_in_a_hundred_is_a_probe_unless_it_is_set(rec: Recorder) -> None:
    asked: list[float] = []

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(rec, carry, name="probed")
        return carry + 1, None

    program = hcb.jit(lambda x, steps: lax.scan(step, x, steps)[0])
    hcb.taps["probed"].when(lambda value: asked.append(float(value)), probe_sec=0)
    for start, length in ((0.0, 1), (1.0, 99), (100.0, 1), (101.0, 150)):
        program(start, jnp.zeros(length))
        hcb.barrier_wait()
    assert asked == [0, 100, 200]
    assert rec.floats() == [0]


def test_messages_on_their_way_when_the_predicate_fails_are_not_delivered(rec: Recorder) -> None:
    asked: list[float] = []

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(rec, carry, name="on its way")
        return carry + 1, None

    def holds(value: Any) -> bool:
        asked.append(float(value))
        return asked[-1] < 100 or asked[-1] % 7 == 0

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=2000)[0])
    hcb.taps["on its way"].when(holds, probe_every=10)
    program(0.0)
    hcb.barrier_wait()
    expected = [
        value for value, before in zip(asked, [0.0, *asked], strict=False) if before < 100 or before % 7 == 0
    ]
    assert rec.floats() == expected
    assert rec.floats()[:101] == list(range(101))
    assert len(rec) + hcb.taps["on its way"].suppressed["on its way"] == 2000


def test_a_predicate_gets_the_tap_functions_arguments(rec: Recorder) -> None:
    seen: list[Any] = []
    program = hcb.jit(lambda x: hcb.id_tap(rec, {"loss": x, "rest": (x, None)}, name="a tree"))
    hcb.taps["a tree"].when(lambda value: [seen.append(value), True][1])
    program(2.0)
    hcb.barrier_wait()
    assert seen == rec.values == [{"loss": 2.0, "rest": (2.0, None)}]


def test_a_predicate_that_raises_is_reported_and_taken_to_hold(rec: Recorder) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="badly asked"))
    hcb.taps["badly asked"].when(lambda value: 1 / 0)
    program(1.0)
    program(2.0)
    with pytest.raises(hcb.TapFunctionException) as raised:
        hcb.barrier_wait()
    assert len(raised.value.failures) == 2
    assert "predicate of the tap's rule" in "".join(raised.value.exceptions[0].__notes__)
    assert rec.floats() == [1, 2]


def test_another_predicate_begins_with_an_open_gate(rec: Recorder) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="asked again"))
    hcb.taps["asked again"].when(lambda value: False, probe_every=0, probe_sec=1e6)
    for value in range(3):
        program(float(value))
        hcb.barrier_wait()
    assert rec.floats() == [0]
    hcb.taps["asked again"].when(lambda value: True)
    for value in range(3, 6):
        program(float(value))
        hcb.barrier_wait()
    assert rec.floats() == [0, 3, 4, 5]


def test_of_shards_the_whole_value_is_asked_about(rec: Recorder) -> None:
    shapes: list[Any] = []
    x = jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(jax.devices(), ("i",)), PartitionSpec("i")))
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="asked whole") + 1)
    hcb.taps["asked whole"].when(
        lambda value: [shapes.append(value.shape), value[0] < 2][1], probe_every=3, probe_sec=0
    )
    for start in range(8):
        program(x + start)
        hcb.barrier_wait()
    assert set(shapes) == {(8,)}
    assert [value[0] for value in rec.values] == [0, 1, 2]
