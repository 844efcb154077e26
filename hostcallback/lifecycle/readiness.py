"""Makes `jax.block_until_ready` wait for callbacks that `accelerate` took over.

On the CPU, JAX has called the callbacks of a program by the time its results are ready. A library that then closes a
progress bar or a file, or reads data that callbacks have collected, would do so too early, because our callbacks run
later. Prints need no such wait: `jax.effects_barrier` and the end of the process wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

from hostcallback import _jax_compat as compat
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.runtime import POLL_SEC, runtime

STALL_SEC = 5.0
"""Seconds that `block_until_ready` waits for one callback. The callback may wait for a lock of the waiting thread."""

_undo: Callable[[], None] | None = None
_expected = False
_told: set[str] = set()  # source lines of the slow callbacks that were logged


def begin() -> None:
    """Makes `block_until_ready` wait once callbacks are expected. Must not be called twice before `end`."""
    global _undo
    try:
        _undo = compat.extend_block_until_ready(_wait)
    except LookupError as error:
        logger.warning(
            "jax.block_until_ready does not wait for callbacks under hcb.accelerate(), since this JAX is not known: "
            "%s. Use jax.effects_barrier(). Update hostcallback",
            error,
        )


def end() -> None:
    """Restores JAX's `block_until_ready`."""
    global _undo
    # Before it is undone, because threads that are in `_wait` look at it.
    undo, _undo = _undo, None
    if undo is not None:
        undo()


def expect_callbacks() -> None:
    """Notes that programs may call callbacks in addition to prints."""
    global _expected
    _expected = True


def _wait() -> None:
    # All messages of programs whose results are ready have been emitted. Later messages of programs that still run are
    # not waited for.
    if _undo is None or not _expected:
        return
    targets = [(r, r.source.counters().emitted) for r in runtime.receivers() if r.queued()]
    if targets and not runtime.serves(threading.current_thread()):
        for receiver, emitted in targets:
            _wait_for(receiver, emitted)


def _wait_for(receiver: DeviceReceiver, emitted: int) -> None:
    queued, since = receiver.queued(), perf_counter()
    while not receiver.wait_consumed(emitted, POLL_SEC):
        now = perf_counter()
        # Progress restarts the time: the limit is for one callback, not for all of them.
        if receiver.queued() != queued:
            queued, since = receiver.queued(), now
        running = receiver.running_tap()
        stalled_sec = max(now - since, 0.0 if running is None else running[1])
        if stalled_sec > STALL_SEC:
            line = receiver.name if running is None else running[0].source_line
            if line not in _told:
                _told.add(line)
                logger.warning(
                    "jax.block_until_ready stops waiting for the emitted messages: %s. The callback may wait for a "
                    "lock of the waiting thread; jax.effects_barrier() waits without this limit",
                    receiver.describe_wait(),
                )
            return
