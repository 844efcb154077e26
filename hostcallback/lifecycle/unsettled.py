"""Callbacks of a barrier: some run before it waits for messages, others once the messages are delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable

Settle = Callable[[float | None], None]
"""Called with the `perf_counter()` value at which to give up; None for never."""

_lock = threading.Lock()  # protects the two below
_settlers: dict[Settle, None] = {}
_after_delivery: dict[Settle, None] = {}


def add(settle: Settle) -> None:
    """Has `settle_all` call `settle(deadline)`, once. Any thread."""
    # Before the lock, since a step adds itself each time it runs.
    if settle not in _settlers:
        with _lock:
            _settlers[settle] = None


def add_after_delivery(settle: Settle) -> None:
    """Has `settle_delivered` call `settle(deadline)`, once. Any thread."""
    if settle not in _after_delivery:
        with _lock:
            _after_delivery[settle] = None


def settle_all(deadline: float | None) -> None:
    """Calls the callbacks that `add` registered since the last time, with the `perf_counter()` deadline.

    Raises:
        TapTimeoutError: the deadline passed. What was not settled is called again the next time.
    """
    _settle(_settlers, deadline)


def settle_delivered(deadline: float | None) -> None:
    """The same for what `add_after_delivery` added. The caller has waited for the messages."""
    _settle(_after_delivery, deadline)


def _settle(settlers: dict[Settle, None], deadline: float | None) -> None:
    while settlers:
        with _lock:
            settle = next(iter(settlers), None)
            if settle is None:
                return
            del settlers[settle]
        # Without the lock: settling waits for devices, and may add steps.
        try:
            settle(deadline)
        except BaseException:
            with _lock:
                settlers[settle] = None
            raise
