"""Has `jax.block_until_ready` wait for callbacks that were taken over: who closes what they use calls it first.

JAX has called the callbacks of a program when its results are ready, on the CPU. A library or a program that closes a
bar or a file then, or looks at what callbacks have collected, would come too early for ours, which run later. Printing
needs no such care: `jax.effects_barrier` and the end of the process wait for it.
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
"""How long a callback may hold up those who wait here. It may itself wait for them, such as for a lock of theirs."""

_undo: Callable[[], None] | None = None
_expected = False
_told: set[str] = set()  # the callbacks that have held somebody up, by source line


def begin() -> None:
    """From now on `block_until_ready` waits, once callbacks are expected. Not twice before `end`."""
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
    """From now on `block_until_ready` is JAX's again."""
    global _undo
    undo, _undo = _undo, None
    if undo is not None:
        undo()


def expect_callbacks() -> None:
    """Tells that programs may call callbacks, and not only print."""
    global _expected
    _expected = True


def _wait() -> None:
    # What arrays are ready for has been emitted. Programs that still run may emit more, which is not waited for.
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
        if receiver.queued() != queued:
            queued, since = receiver.queued(), now
        running = receiver.running_tap()
        stalled_sec = max(now - since, 0.0 if running is None else running[1])
        if stalled_sec > STALL_SEC:
            line = receiver.name if running is None else running[0].source_line
            if line not in _told:
                _told.add(line)
                logger.warning(
                    "jax.block_until_ready waits no longer for what was emitted before: %s. It may wait for what the "
                    "waiting thread holds, such as a lock; jax.effects_barrier() waits for it to the end",
                    receiver.describe_wait(),
                )
            return
