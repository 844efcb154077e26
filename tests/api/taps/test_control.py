"""`hcb.taps[glob]`: taps are switched off and on at run time, in programs that are compiled already."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import Jit


@pytest.fixture(autouse=True)
def everything_on() -> Iterator[None]:
    yield
    hcb.taps["*"].enable()


def test_taps_are_switched_by_glob_without_recompiling(jit: Jit) -> None:
    loss, grad, other = Recorder(), Recorder(), Recorder()
    traced = []

    def f(x: Any) -> Any:
        traced.append(x)
        hcb.id_tap(loss, x, name="stratum1/loss")
        hcb.id_tap(grad, x, name="stratum1/grad")
        return hcb.id_tap(other, x, name="other") + 1

    program = jit(f)

    def deliver() -> list[int]:
        before = [len(rec) for rec in (loss, grad, other)]
        program(1.0)
        hcb.barrier_wait()
        return [len(rec) - n for rec, n in zip((loss, grad, other), before, strict=True)]

    assert deliver() == [1, 1, 1]
    compiled = len(traced)
    assert hcb.taps["stratum*"].disable() == ["stratum1/grad", "stratum1/loss"]
    assert deliver() == [0, 0, 1]
    assert hcb.taps["stratum?/loss"].enable() == ["stratum1/loss"], "the later switch wins"
    assert deliver() == [1, 0, 1]
    hcb.taps["*"].disable()
    assert deliver() == [0, 0, 0]
    hcb.taps["*"].enable()
    assert deliver() == [1, 1, 1]
    if hcb.jit is jit:
        assert len(traced) == compiled


def test_a_tap_that_is_traced_later_is_off_too(caplog: pytest.LogCaptureFixture, rec: Recorder) -> None:
    early = hcb.jit(lambda x: hcb.id_tap(rec, x, name="early bird"))
    early(1.0)
    with caplog.at_level(logging.WARNING):
        assert hcb.taps["early birds"].disable() == []
    assert "no tap is called 'early birds' so far; there are 'early bird'" in caplog.text
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="early birds"))
    program(1.0)
    hcb.barrier_wait()
    assert len(rec) == 1
    hcb.taps["early birds"].enable()
    program(1.0)
    hcb.barrier_wait()
    assert len(rec) == 2


def test_a_switch_reaches_a_program_that_runs() -> None:
    seen: list[int] = []

    def body(i: Any) -> Any:
        hcb.id_tap(lambda v: seen.append(int(v)), i, name="in the loop")
        switched = hcb.call(
            lambda v: [hcb.taps["in the loop"].disable() if v == 5 else None, v][1], i, result_shape=i
        )
        return switched + 1

    hcb.jit(lambda: lax.while_loop(lambda i: i < 10, body, jnp.int32(0)))()
    hcb.barrier_wait()
    assert seen == list(range(6))


def test_a_tap_is_off_on_every_device(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    spec = PartitionSpec("i")
    f = hcb.jit(
        jax.shard_map(
            lambda x: hcb.id_tap(rec, x, name="everywhere"), mesh=mesh, in_specs=spec, out_specs=spec
        )
    )
    f(jnp.arange(4))
    hcb.barrier_wait()
    hcb.taps["everywhere"].disable()
    f(jnp.arange(4))
    hcb.barrier_wait()
    assert len(rec) == 4


def test_shards_match_again_after_a_tap_was_off(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    f = jax.jit(lambda x: hcb.id_tap(rec, x, name="in shards") + 1)
    for round in range(6):
        (hcb.taps["in shards"].disable if round % 2 else hcb.taps["in shards"].enable)()
        f(x * round).block_until_ready()
        hcb.barrier_wait()
    assert [value.tolist() for value in rec.values] == [[n * r for n in range(8)] for r in (0, 2, 4)]


def test_checks_are_switched_too_and_each_switch_holds() -> None:
    program = hcb.jit(lambda x: hcb.check(x > 0, "negative {}", x, name="sign"))

    def fails() -> bool:
        program(-1.0)
        try:
            hcb.barrier_wait()
        except hcb.TapFunctionException:
            return True
        return False

    assert fails()
    hcb.taps["sign"].disable()
    assert not fails()
    hcb.enable_checks()
    assert not fails()
    hcb.taps["sign"].enable()
    assert fails()
    hcb.disable_checks("sign")
    hcb.taps["sign"].enable()
    assert not fails()
    hcb.enable_checks("sign")
    assert fails()


@pytest.mark.native_only
def test_calls_and_exported_taps_stay() -> None:
    before = set(hcb.taps.names)  # of other tests' programs
    called: list[float] = []
    seen: list[float] = []
    exported = jax.export.export(
        jax.jit(lambda x: hcb.id_tap(print, x, name="in the export")), disabled_checks=hcb.export_checks()
    )
    hcb.bind("in the export", lambda x: seen.append(float(x)))
    program = jax.jit(
        lambda x: hcb.call(lambda v: [called.append(float(v)), v][1], x, result_shape=x, name="call me")
    )
    assert "call me" not in hcb.taps.names
    hcb.taps["*"].disable()
    try:
        exported(jnp.float32(0)).call(jnp.float32(3))
        program(jnp.float32(4)).block_until_ready()
        hcb.barrier_wait()
    finally:
        hcb.unbind("in the export")
    assert (seen, called) == ([3], [4])
    assert not any("exported" in name or name == "call me" for name in set(hcb.taps.names) - before)


def test_existing_taps_are_listed(rec: Recorder) -> None:
    program = hcb.jit(lambda x: hcb.id_tap(rec, x, name="visible"))
    program(1.0)
    assert "visible" in hcb.taps.names
    assert "visible" in repr(hcb.taps)
    assert repr(hcb.taps["visib*"]) == "<taps['visib*']: visible>"
    hcb.barrier_wait()


def test_a_selection_is_a_text() -> None:
    with pytest.raises(TypeError, match=r"taps are selected by name, got 3: as in hcb\.taps\['loss\*'\]"):
        hcb.taps[3]  # type: ignore[index]
