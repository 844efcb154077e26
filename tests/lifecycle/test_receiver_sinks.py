"""Sinks of a receiver: they get every message in addition to the taps' own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


def test_sinks_get_whole_values_of_arrays_on_several_devices() -> None:
    seen: list[Any] = []
    mesh = Mesh(np.array(jax.devices()), ("d",))
    value = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("d")))
    with hcb.outfeed_receiver(sinks=[seen.append]):
        hcb.jit(lambda x: hcb.id_tap(nothing, x * 2, name="sharded"))(value).block_until_ready()
    (message,) = seen
    assert message.arrays[0].tolist() == [2.0 * k for k in range(8)]
    assert message.consumer.name == "sharded"


def test_each_block_of_one_receiver_is_recorded_once(tmp_path: Path) -> None:
    emit = hcb.jit(lambda x: hcb.metrics({"loss": x}, name="train"))
    receiver = hcb.outfeed_receiver(record=tmp_path / "log", sinks=[hcb.record(tmp_path / "own")])
    for epoch in range(3):
        with receiver:
            emit(jnp.float32(epoch))
    for log in "log", "own":
        assert hcb.read(tmp_path / log)["train"].to_numpy()["loss"].tolist() == [0.0, 1.0, 2.0]


def test_a_sink_that_raises_keeps_no_other_sink_from_the_message() -> None:
    own: list[Any] = []
    other: list[Any] = []

    def failing(message: Any) -> None:
        raise ValueError("a sink failed")

    with pytest.raises(hcb.TapFunctionException, match="1 tap function"):
        with hcb.outfeed_receiver(sinks=[failing, other.append]) as rx:
            hcb.jit(lambda x: hcb.id_tap(own.append, x))(1.0).block_until_ready()
    assert own == [1.0]
    assert len(other) == 1
    assert sum(row.failed for row in rx.stats) == 1


def test_tap_functions_may_change_the_values_other_sinks_get() -> None:
    seen: list[float] = []

    def change(value: Any) -> None:
        value += 100

    with hcb.outfeed_receiver(sinks=[lambda message: seen.append(float(message.arrays[0][0]))]):
        hcb.jit(lambda x: hcb.id_tap(change, x))(jnp.ones(2)).block_until_ready()
    assert seen == [1.0]


def test_results_of_calls_come_back_although_sinks_see_them() -> None:
    seen: list[Any] = []
    with hcb.outfeed_receiver(sinks=[seen.append]):
        out = hcb.jit(lambda x: hcb.call(lambda v: v + 1, x, result_shape=x))(jnp.float32(1))
        assert float(out) == 2
    assert [float(message.arrays[0]) for message in seen] == [1.0]


def test_sinks_end_with_their_receiver() -> None:
    seen: list[Any] = []
    program = hcb.jit(lambda x: hcb.id_tap(nothing, x))
    with hcb.outfeed_receiver(sinks=[seen.append]):
        program(1.0)
    program(1.0)
    hcb.barrier_wait()
    assert len(seen) == 1


def test_sinks_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="sinks is"):
        hcb.outfeed_receiver(sinks=nothing)  # type: ignore[arg-type]


def test_a_receiver_in_another_process_is_refused_with_what_there_is_instead() -> None:
    with pytest.raises(
        ValueError, match=r"process=True was removed.*record=FOLDER.*hcb tail.*flight_recorder="
    ):
        hcb.outfeed_receiver(process=True)  # type: ignore[arg-type]
