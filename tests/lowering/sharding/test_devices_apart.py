"""Receivers may progress at very different rates: shards of one device wait for the others, however slow their taps."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.sharding import assembly, sinks as shards
from recorder import Recorder


class Busy:
    """A tap function that keeps its device's receiver until it is told to return."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, _: Any) -> None:
        self.entered.set()
        assert self.open.wait(100)


def sharded(value: float) -> Any:
    mesh = Mesh(jax.devices(), ("i",))
    return jax.device_put(np.full(8, value, np.float32), NamedSharding(mesh, P("i")))


def occupy(device: jax.Device) -> Busy:
    """Makes a device's receiver busy with a separate tap."""
    busy = Busy()
    hcb.jit(lambda x: hcb.id_tap(busy, x))(jax.device_put(jnp.float32(0), device))
    assert busy.entered.wait(100)
    return busy


def in_order(rec: Recorder, count: int) -> bool:
    return [value.tolist() for value in rec.values] == [[float(step)] * 8 for step in range(count)]


def test_one_device_may_be_hundreds_of_launches_behind(rec: Recorder) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    busy = occupy(jax.devices()[2])
    for step in range(700):
        f(sharded(step))
    busy.open.set()
    hcb.barrier_wait()
    assert in_order(rec, 700)


def test_devices_without_room_wait_for_one_with_a_slow_tap(
    monkeypatch: pytest.MonkeyPatch, rec: Recorder
) -> None:
    looks = []
    is_another_receiver_busy = runtime.is_another_receiver_busy
    monkeypatch.setattr(
        runtime, "is_another_receiver_busy", lambda: looks.append(is_another_receiver_busy()) or looks[-1]
    )
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 8)
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.01)
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    busy = occupy(jax.devices()[2])
    for step in range(100):
        f(sharded(step))
    tick = threading.Event()
    while len(looks) < 100:  # for much longer than they wait for devices that do nothing
        tick.wait(0.001)
    assert all(looks)
    assert len(rec) == 0
    busy.open.set()
    hcb.barrier_wait()
    assert in_order(rec, 100)
