"""Delivers the remaining messages when the process ends."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from contextlib import suppress
from time import perf_counter
from types import TracebackType

from hostcallback.api.barrier import leave_effects_barrier, merge, use_in_exit_handlers, wait_for_taps
from hostcallback.lifecycle import receivers as transport, wait_bounds
from hostcallback.lifecycle.job import this_job
from hostcallback.primitives import effects
from hostcallback.receiver import environment
from hostcallback.receiver.errors import ReentrantWaitError, TapFunctionException, TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime import signals
from hostcallback.receiver.runtime.dispatch.scope import never_entered, tell_never_entered
from hostcallback.receiver.runtime.rules import rules
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks import progress
from hostcallback.receiver.text import say
from hostcallback.sync.threads import hold_daemon_threads

EXIT_STATUS = 1
"""The exit status of a process whose failures were not reported before its end, if it would exit with 0."""

LAST_TAP_SEC = 0.3
"""Seconds that the tap that runs when an interrupted program ends may take to return."""


@atexit.register
def _end_program() -> None:
    # Runs after the last line of the program and before JAX's exit handlers, so that no message is lost silently.
    this_job.look()
    try:
        _deliver_at_exit()
    finally:
        rules.tell_early(lambda: rules.tap_names(runtime.registry), ends=True)
        for bars in progress.shown:
            bars.write_lines()
        if this_job.failure is not None:
            _fail_exit()
        this_job.leave()


_gave_up = False  # whether a wait at exit was interrupted, or took too long
_begun = False


def _deliver_at_exit() -> None:
    # Exit handlers that were registered later, and run before, call this by `jax.effects_barrier`.
    global _gave_up, _begun
    if _gave_up:
        return
    if getattr(sys, "last_type", None) is None and not _begun:  # otherwise the program has ended before it
        tell_never_entered([*never_entered])
    _begun = True
    with suppress(KeyboardInterrupt):  # then without it
        hold_daemon_threads()  # also because the wait below would be longer
    leave_effects_barrier()
    if not transport.started():
        return
    if signals.watch_interrupt.exits:
        if not wait_bounds.has_told_loss(sys.last_value):  # nothing was lost
            runtime.remove_files()
        return
    # Another library may have replaced our hook for exceptions.
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt
    lost = False
    try:
        if interrupted or this_job.failure is not None:
            wait_for_taps(deadline=perf_counter() + wait_bounds.GRACE_SEC, stall_sec=wait_bounds.GRACE_SEC)
        else:
            exit_wait = wait_bounds.ExitWait(wait_bounds.EXIT_STALL_SEC)
            wait_for_taps(exit_wait=exit_wait)
            wait_bounds.flush_writers(exit_wait.look)
    except TapTimeoutError as error:
        _gave_up = True
        logger.error("at exit: %s", error)
        runtime.close_calls("hostcallback: the process ends, and the host function has not returned in time")
        for receiver in runtime.receivers():
            if receiver.queued():
                lost = True
                logger.error("%d message(s) of %s were lost at exit", receiver.queued(), receiver.name)
    except KeyboardInterrupt:
        _gave_up = True
        lost = _give_up_at_exit()
    with suppress(KeyboardInterrupt):
        hold_daemon_threads()  # again: the wait may have taken longer than they are held
    errors = _take_errors(getattr(sys, "last_value", None))
    if not lost:
        runtime.remove_files()
    # The daemon threads go on, because exit handlers that were registered earlier may still emit messages.
    if errors is not None:
        _report(errors)


use_in_exit_handlers(_deliver_at_exit)


def _give_up_at_exit() -> bool:
    # Ctrl-C at exit. Returns whether messages were lost.
    backlog = wait_bounds.describe_backlog()
    logger.error("interrupted at exit. Lost: %s", backlog or "nothing that was emitted so far")
    with suppress(KeyboardInterrupt):
        signals.watch_interrupt.exits = True
        # Programs that wait for room must end, too: JAX's exit waits for them.
        runtime.skip_taps(True)
        runtime.close_calls(_CALLS_END)
        _wait_until(perf_counter() + LAST_TAP_SEC)
    return bool(backlog)


_CALLS_END = "hostcallback: the process ends, and waiting for the host function was interrupted"


def _end_interrupted(error: BaseException) -> None:
    # The traceback of the interrupt is to be the last on the screen: taps end and all is said before it.
    if not transport.started() or signals.is_interactive() or any(map(_may_tap, threading.enumerate())):
        return
    lost: list[str] = []
    try:
        hurries = False
        if not wait_bounds.has_told_loss(error):  # no receiver has waited
            wait = wait_bounds.InterruptedWait()
            hurries = not _wait_until(wait.deadline)
            wait.note_backlog()
            lost = [f"lost: {wait.backlog}"] if wait.backlog else []
        signals.watch_interrupt.exits = True
        runtime.skip_taps(True)
        runtime.close_calls(_CALLS_END)
        if not hurries:  # the tap that runs now may print
            _wait_until(perf_counter() + LAST_TAP_SEC)
        errors = _take_errors(error)
        if errors is not None:
            _report(errors)
    finally:  # also after another Ctrl-C
        wait_bounds.tell_loss(error, lost)


def _take_errors(told: BaseException | None) -> TapFunctionException | None:
    # `told`: what has ended the program. Python prints it.
    if effects.forget_failures is not None:  # also if the wait has not ended
        effects.forget_failures()
    for scope in runtime.current_scopes():
        scope.deferred.forget_told(told)
    return merge(runtime.take_deferred())


def _may_tap(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def _wait_until(deadline: float) -> bool:
    # False if another Ctrl-C ended the wait.
    try:
        wait_for_taps(deadline=deadline)
    except (TapTimeoutError, ReentrantWaitError):
        pass
    except KeyboardInterrupt:
        return False
    return True


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if wait_bounds.is_interrupt(error):
        with suppress(KeyboardInterrupt):
            _end_interrupted(error)
    this_job.tell_uncaught(error, trace)
    _previous_hook(kind, error, trace)


_previous_hook = sys.excepthook
sys.excepthook = _on_uncaught


def _report(errors: TapFunctionException) -> None:
    say("hostcallback: taps raised or checks failed, and no barrier_wait() or receiver reported it:")
    traceback.print_exception(errors)
    if environment.EXIT_STATUS.read():
        _fail_exit()


def _fail_exit() -> None:
    if native.available():
        native.load().hcb_fail_exit(EXIT_STATUS)
