"""A fence that fails while several threads wait for it."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

import hostcallback.api  # noqa: F401  (before the rooms below it, whose imports depend on its order)
from hostcallback.sync.fence import Fence
from hostcallback.sync.threads import DispatchError, dispatch_thread

WAIT_SEC = 20.0


def test_each_thread_that_waits_for_a_failed_fence_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Any) -> None:
        raise RuntimeError("no program can be run")

    fence, held, looked = Fence(), threading.Event(), [threading.Event(), threading.Event()]
    monkeypatch.setattr(fence, "_fence", fail)
    raised: list[BaseException] = []

    def wait(number: int) -> None:
        try:
            fence.wait(jax.local_devices(backend="cpu")[:1], looked[number].set)
        except DispatchError as error:
            raised.append(error)

    dispatch_thread.submit(lambda: held.wait(WAIT_SEC) and None)
    threads = [threading.Thread(target=wait, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    assert all(event.wait(WAIT_SEC) for event in looked)
    held.set()
    for thread in threads:
        thread.join(WAIT_SEC)
    assert len(raised) == 2
