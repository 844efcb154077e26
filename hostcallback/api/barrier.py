"""Waiting for taps: `barrier_wait`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from time import perf_counter

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import effect_dispatch
from hostcallback.receiver.errors import ReentrantWaitError, TapFunctionException
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import inflight


class _ThisThread(threading.local):
    waits = False


_this_thread = _ThisThread()


def barrier_wait(timeout_sec: float | None = None) -> None:
    """Waits until every tap of every computation dispatched before this call has been delivered.

    Covers computations that any thread dispatched (its call has returned), through any jit, on every device, whatever
    has become of their results. Interruptible by Ctrl-C. It waits for computations without taps as well. If other
    threads keep a CPU device busy without an end, the barrier stops waiting after a minute for those of their
    computations whose results were dropped, and logs that.

    Args:
        timeout_sec: seconds to wait at most; None for as long as it takes.

    Raises:
        TapFunctionException: what tap functions raised since the last report.
        TapTimeoutError: the time was up; names what still runs and how much is queued. Nothing is lost:
            delivery goes on, and the next barrier waits for it.
        ReentrantWaitError: called from a tap function, or from a signal handler that interrupted a barrier.
        ValueError: `timeout_sec` is no number of seconds.
    """
    if timeout_sec is not None and (not isinstance(timeout_sec, int | float) or not timeout_sec >= 0):
        raise ValueError(f"timeout_sec is {timeout_sec!r}, expected a number of seconds, 0 or more, or None")
    deadline = None if timeout_sec is None else perf_counter() + timeout_sec
    wait_for_taps(deadline=deadline)
    for receiver in runtime.receivers():
        for sink in receiver.scope.batch_sinks:
            sink.flush()
    error = merge(runtime.take_deferred())
    if error is not None:
        raise error


def wait_for_taps(
    names: Iterable[str] | None = None, *, deadline: float | None = None, stall_sec: float | None = None
) -> None:
    """What `barrier_wait` and the end of a receiver do, without raising what was deferred.

    Args:
        names: of devices; all by default.
        deadline: the `perf_counter()` value to give up at; None for never.
        stall_sec: give up when one invocation of a tap has run for longer; None for never.

    Raises:
        TapTimeoutError: it gave up.
        ReentrantWaitError: called from a tap function, or from a signal handler that interrupted it.
    """
    runtime.check_not_reentrant("waiting for taps")
    if _this_thread.waits:
        raise ReentrantWaitError(
            "waiting for taps from a signal handler that interrupted such a wait would wait for itself: set a flag in "
            "the handler, and wait where the program looks at it"
        )
    _this_thread.waits = True
    try:
        _wait_for_taps(names, deadline, stall_sec)
    finally:
        _this_thread.waits = False


def _wait_for_taps(names: Iterable[str] | None, deadline: float | None, stall_sec: float | None) -> None:
    # Programs dropped by now were dispatched before: when the wait is over, no message of theirs is on its way.
    retired = runtime.registry.retired()
    # A stalled tap can hold a computation for ever: while computations run, look at the receivers too.
    inflight.wait(deadline, lambda: runtime.check_stalled(stall_sec))
    runtime.wait_delivered(names, deadline=deadline, stall_sec=stall_sec)
    effect_dispatch.forget_failures()
    if names is None:
        runtime.registry.forget(retired)


def merge(found: Sequence[TapFunctionException]) -> TapFunctionException | None:
    """One report of several; None of none."""
    if len(found) < 2:
        return found[0] if found else None
    suppressed: dict[str, int] = {}
    for error in found:
        for line, count in error.suppressed.items():
            suppressed[line] = suppressed.get(line, 0) + count
    return TapFunctionException(
        "; ".join(error.message for error in found),
        [e for error in found for e in error.exceptions],
        [f for error in found for f in error.failures],
        suppressed,
    )


def _in_effects_barrier() -> None:
    # Tap functions may call it, and JAX's own callbacks: what they wait for then is JAX's own.
    if _exiting or runtime.serves(threading.current_thread()) or compat.in_callback_of_jax():
        return
    if runtime.receivers():
        barrier_wait()


_exiting = False


def leave_effects_barrier() -> None:
    """Has JAX's exit wait for no taps: the process ends, and what they raised has been reported."""
    global _exiting
    _exiting = True


compat.extend_effects_barrier(_in_effects_barrier)
