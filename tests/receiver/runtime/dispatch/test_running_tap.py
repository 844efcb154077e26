"""`DeviceReceiver.running_tap`, while the receiver thread begins a message between its two reads."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from hostcallback.receiver.runtime.device_receiver import DeviceReceiver

IDLE_SEC = 3600.0


class _BeginsOnRead:
    """A dispatcher that was idle for an hour and begins a message once one of its attributes is read."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {"current": None, "current_since": perf_counter() - IDLE_SEC}

    def __getattr__(self, name: str) -> Any:
        value = self._values[name]
        self._values.update(current_since=perf_counter(), current="tap")
        return value


def test_the_idle_time_before_a_message_does_not_count_as_its_taps() -> None:
    receiver = DeviceReceiver.__new__(DeviceReceiver)
    receiver.dispatcher = _BeginsOnRead()  # type: ignore[assignment]
    receiver.thread = threading.Thread()
    receiver.is_working = False
    running = receiver.running_tap()
    assert running is None or running[1] < IDLE_SEC / 2
    later = receiver.running_tap()
    assert later is not None
    assert later[1] < IDLE_SEC / 2
