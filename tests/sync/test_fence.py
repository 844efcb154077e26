"""Fences rely on XLA:CPU's limit of programs in flight per device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hostcallback import _jax_compat as compat
from hostcallback.receiver.native import bindings as native_library
from hostcallback.sync import fence, threads

if not native_library.available():
    pytest.skip("fences are made by the native library", allow_module_level=True)


@pytest.fixture
def held() -> Iterator[Any]:
    device = jax.devices()[1]
    dispatch = threads.held_program(device)
    results: list[Any] = []
    # On a separate thread: until JAX 0.9, a callback that raised leaves behind a thread that runs programs inline.
    dispatching = threading.Thread(target=lambda: results.append(dispatch()))
    threads.begin()
    try:
        dispatching.start()
        dispatching.join(20)
        yield results[0]
    finally:
        threads.end()


def test_a_device_has_as_many_places_as_a_fence_takes(held: Any) -> None:
    follow = fence._follower(jax.devices()[1])
    taken = [follow(held) for _ in range(compat.PROGRAMS_IN_FLIGHT - 1)]
    one_more = threading.Thread(target=follow, args=[held])
    one_more.start()
    one_more.join(0.3)
    assert one_more.is_alive()
    assert not any(array.is_ready() for array in taken)
    threads.end()
    one_more.join()
    jax.block_until_ready(taken)


def test_another_programs_place_is_not_to_be_had(held: Any) -> None:
    follow = fence._follower(jax.devices()[1])
    # The array is donated, deleted or dropped: its program has no owner left, but still holds its slot.
    jax.jit(lambda x: x * 2)(held).delete()
    for _ in range(compat.PROGRAMS_IN_FLIGHT - 2):
        follow(held)
    last = threading.Thread(target=follow, args=[held])
    last.start()
    last.join(0.3)
    assert last.is_alive()
    threads.end()
    last.join()


@pytest.mark.slow
def test_a_fence_that_others_lift_early_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, dispatch = jax.devices()[1], threads.held_program(jax.devices()[1])

    def slowly() -> (
        Any
    ):  # a busy machine: the waiting thread loses its patience before the first slot is counted
        result = dispatch()
        threading.Event().wait(0.05)
        return result

    monkeypatch.setattr(threads, "held_program", lambda device: slowly)
    monkeypatch.setattr(fence, "PATIENCE_SEC", 0.001)
    ended = threading.Event()
    program = jax.jit(lambda x: jax.pure_callback(lambda x: (ended.wait(2), x)[1], x, x) * jnp.ones(5000))
    program(jax.device_put(jnp.float32(1), device))
    monkeypatch.setattr(fence, "GIVE_UP_SEC", 1.0)
    began = time.perf_counter()
    assert not fence.fence.wait([device], lambda: None), "the fence gave up, since it never had all slots"
    assert time.perf_counter() - began > 1.0
    ended.set()
