"""`barrier_wait`: waits for all taps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle.wait_bounds import ExitWait
from hostcallback.primitives import effects
from hostcallback.receiver.errors import ReentrantWaitError, TapFunctionException
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.cells import cells
from hostcallback.receiver.runtime.rules import rules
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.runtime.stop import stop_request
from hostcallback.receiver.sinks import progress
from hostcallback.sync import inflight
from hostcallback.tracing.source_line import public, user_source_line


class _ThisThread(threading.local):
    waits = False


_this_thread = _ThisThread()
_told: set[str] = set()  # lines of barriers in traced code


@public
def barrier_wait(timeout_sec: float | None = None) -> None:
    """Waits until all taps of all computations dispatched before this call have been delivered.

    Covers computations of all threads whose dispatching call has returned, through any jit, on every device, even if
    their results were dropped. It also waits for computations without taps, and for the taps of programs that tap
    functions dispatch meanwhile, up to 16 deep. Ctrl-C interrupts it. If other threads keep a CPU device busy without
    end, the barrier waits one minute for those of their computations whose results were dropped; then it stops waiting
    for them and logs that. In traced code it waits while the program is traced, and logs that.

    Args:
        timeout_sec: largest number of seconds to wait; None for no limit.

    Raises:
        TapFunctionException: has all exceptions of tap functions since the last report.
        TapTimeoutError: the time was up. Names the running function and the number of queued messages. No message is
            lost: delivery goes on, and the next barrier waits for it.
        ReentrantWaitError: called from a tap function, or from a signal handler that interrupted a barrier.
        ValueError: `timeout_sec` is not a number of seconds.

    Example:
        out = train_step(x)
        hcb.barrier_wait()  # all taps of train_step have run
    """
    if timeout_sec is not None and (not isinstance(timeout_sec, int | float) or not timeout_sec >= 0):
        raise ValueError(f"timeout_sec is {timeout_sec!r}, expected a number of seconds, 0 or more, or None")
    if in_traced_code():
        _tell_of_trace(str(user_source_line()))
    deadline = None if timeout_sec is None else perf_counter() + timeout_sec
    wait_for_taps(deadline=deadline)
    for scope in dict.fromkeys(receiver.scope for receiver in runtime.receivers()):
        for sink in scope.batch_sinks:
            sink.flush()
        if scope.metrics is not None:
            # A writer that is blocked is reported, and the barrier goes on.
            scope.metrics.flush(None if deadline is None else max(0.0, deadline - perf_counter()))
    error = merge(runtime.take_deferred())
    if error is not None:
        raise error


def in_traced_code() -> bool:
    """Whether the calling thread traces a program."""
    return compat.trace_context.trace is not compat.eval_trace and compat.is_staging()


def _tell_of_trace(line: str) -> None:
    if line not in _told:
        _told.add(line)
        logger.warning(
            "hcb.barrier_wait() at %s is in traced code: it waits now, while the program is traced, and never when the "
            "program runs. Call it outside of jit, after the call of the program",
            line,
        )


def wait_for_taps(
    names: Iterable[str] | None = None,
    *,
    deadline: float | None = None,
    stall_sec: float | None = None,
    exit_wait: ExitWait | None = None,
) -> None:
    """Waits for taps, for `barrier_wait`, the end of a receiver and that of the process. Raises no deferred errors.

    Args:
        names: names of the devices; all by default.
        deadline: `perf_counter()` value at which to give up; None for never.
        stall_sec: gives up if one invocation of a tap runs for longer; None for never.
        exit_wait: gives up when this does.

    Raises:
        TapTimeoutError: the deadline or the limit of one invocation has passed, or `exit_wait` raised it.
        ReentrantWaitError: called from a tap function, or from a signal handler that interrupted it.
    """
    runtime.check_not_reentrant("waiting for taps")
    if _this_thread.waits:
        raise ReentrantWaitError(
            "waiting for taps from a signal handler that interrupted such a wait would wait for itself: set a flag in "
            "the handler, and wait where the program looks at it"
        )
    _this_thread.waits = True
    if rules.early:  # now, since the wait forgets the taps of programs that are dropped
        rules.tell_early(lambda: rules.tap_names(runtime.registry))
    try:
        _wait_for_taps(names, deadline, stall_sec, exit_wait)
    finally:
        _this_thread.waits = False


def _wait_for_taps(
    names: Iterable[str] | None, deadline: float | None, stall_sec: float | None, exit_wait: ExitWait | None
) -> None:
    def look() -> None:
        runtime.check_stalled(stall_sec)
        if exit_wait is not None:
            exit_wait.look()

    # Programs that are dropped by now were dispatched before, so after the wait no message of theirs is on its way.
    retired = runtime.registry.retired()
    names = None if names is None else list(names)
    dispatched = inflight.dispatched_by_tap_functions()
    begun = stop_request.loops_begun() if cells else 0
    # A stalled tap can block a computation without end, so this checks the receivers while computations run.
    inflight.wait(deadline, look)
    if begun:
        stop_request.note_ended(begun)
    runtime.wait_delivered(names, deadline=deadline, stall_sec=stall_sec, look=look)
    # Tap functions that ran meanwhile may have dispatched programs with taps, whose functions may do so, too.
    for _ in range(MAX_GENERATIONS):
        before, dispatched = dispatched, inflight.dispatched_by_tap_functions()
        if dispatched == before:
            break
        inflight.wait_for_tap_functions(deadline, look)
        runtime.wait_delivered(names, deadline=deadline, stall_sec=stall_sec, look=look)
    _call_after_delivery(deadline if exit_wait is None else perf_counter() + exit_wait.idle_sec)
    for bars in progress.shown:
        bars.close_all()
    if effects.forget_failures is not None:
        effects.forget_failures()
    if names is None:
        runtime.default_scope.takes_rest = False
        runtime.registry.forget(retired)


MAX_GENERATIONS = 16
"""How many times a barrier waits for what the functions that it waited for have emitted: it ends even if each emits."""


AfterDelivery = Callable[[float | None], None]
"""Called with the `perf_counter()` value at which to give up; None for never."""

_lock = threading.Lock()  # protects the dict below
_after_delivery: dict[AfterDelivery, None] = {}


def add_after_delivery(call: AfterDelivery) -> None:
    """Has the next wait for taps call `call(deadline)`, once, when the messages are delivered. Any thread."""
    if call not in _after_delivery:
        with _lock:
            _after_delivery[call] = None


def _call_after_delivery(deadline: float | None) -> None:
    while _after_delivery:
        with _lock:
            call = next(iter(_after_delivery), None)
            if call is None:
                return
            del _after_delivery[call]
        try:
            call(deadline)  # without the lock: it may wait for devices, and add others
        except BaseException:
            add_after_delivery(call)  # for the next wait
            raise


def merge(found: Sequence[TapFunctionException]) -> TapFunctionException | None:
    """Merges several reports into one. Returns None for an empty sequence."""
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
    # Tap functions and JAX's callbacks may call jax.effects_barrier, which then waits for JAX's callbacks only: a
    # wait for taps would wait for the caller itself.
    if _exiting or runtime.serves(threading.current_thread()) or compat.in_callback_of_jax():
        return
    if not runtime.receivers():
        return
    if threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive():
        # In an exit handler, such as equinox's, Python prints what is raised and goes on.
        _deliver_at_exit()
    else:
        barrier_wait()


_deliver_at_exit: Callable[[], None] = barrier_wait


def use_in_exit_handlers(deliver: Callable[[], None]) -> None:
    """Has `jax.effects_barrier` call `deliver` in exit handlers, which waits for taps and reports what failed."""
    global _deliver_at_exit
    _deliver_at_exit = deliver


_exiting = False


def leave_effects_barrier() -> None:
    """Makes JAX's exit handler not wait for taps: our handler, which ran before it, has reported their errors."""
    global _exiting
    _exiting = True


compat.extend_effects_barrier(_in_effects_barrier)
