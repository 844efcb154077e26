"""What fences rest on: XLA:CPU lets a device have so many programs in flight, and no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from hostcallback import _jax_compat as compat, fence
from receiver import native_library

if not native_library.available():
    pytest.skip("fences are made by the native library", allow_module_level=True)


@pytest.fixture
def held() -> Iterator[Any]:
    library = native_library.load()
    programs = fence._programs(jax.devices()[1])
    library.hcb_hold_begin()
    try:
        yield programs.hold(programs.operand)
    finally:
        library.hcb_hold_end()


def test_a_device_has_as_many_places_as_a_fence_takes(held: Any) -> None:
    programs = fence._programs(jax.devices()[1])
    taken = [programs.follow(held) for _ in range(compat.PROGRAMS_IN_FLIGHT - 1)]
    one_more = threading.Thread(target=programs.follow, args=[held])
    one_more.start()
    one_more.join(0.3)
    assert one_more.is_alive()
    assert not any(array.is_ready() for array in taken)
    native_library.load().hcb_hold_end()
    one_more.join()
    jax.block_until_ready(taken)


def test_another_programs_place_is_not_to_be_had(held: Any) -> None:
    programs = fence._programs(jax.devices()[1])
    # Donated, deleted or dropped: what it computes has no owner any more, and it has its place.
    jax.jit(lambda x: x * 2)(held).delete()
    for _ in range(compat.PROGRAMS_IN_FLIGHT - 2):
        programs.follow(held)
    last = threading.Thread(target=programs.follow, args=[held])
    last.start()
    last.join(0.3)
    assert last.is_alive()
    native_library.load().hcb_hold_end()
    last.join()
