"""Delivers the remaining messages when the process ends."""

from __future__ import annotations

import atexit
import sys
import traceback
from time import perf_counter

# Imported before the handler below is registered: exit handlers run in reverse order, and those of the imported modules
# close the files that receivers write to, so they must run last.
import hostcallback.api.receiver  # noqa: F401
from hostcallback.api.barrier import leave_effects_barrier, merge, wait_for_taps
from hostcallback.lifecycle import effect_dispatch, receivers as transport
from hostcallback.receiver import environment
from hostcallback.receiver.errors import TapFunctionException, TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.runtime import runtime

EXIT_STATUS = 1
"""The exit status of a process whose failures were not reported before its end, if it would exit with 0."""

EXIT_STALL_SEC = 10.0
"""Seconds that one tap or computation may take at interpreter exit before the remaining messages count as lost."""


@atexit.register
def _deliver_at_exit() -> None:
    # Runs after the last line of the program and before JAX's exit handlers, so that no message is lost silently.
    leave_effects_barrier()
    if not transport.started():
        return
    try:
        wait_for_taps(deadline=perf_counter() + EXIT_STALL_SEC, stall_sec=EXIT_STALL_SEC)
    except TapTimeoutError as error:
        logger.error("at exit: %s", error)
        runtime.close_calls("hostcallback: the process ends, and the host function has not returned in time")
    except KeyboardInterrupt:
        logger.error("interrupted at exit while messages were being delivered")
        runtime.close_calls(
            "hostcallback: the process ends, and waiting for the host function was interrupted"
        )
    effect_dispatch.forget_failures()
    errors = merge(runtime.take_deferred())
    for receiver in runtime.receivers():
        if receiver.queued():
            logger.error("%d message(s) of %s were lost at exit", receiver.queued(), receiver.name)
    if not any(receiver.queued() for receiver in runtime.receivers()):
        runtime.remove_files()
    # The daemon threads go on, because exit handlers that were registered earlier may still emit messages.
    if errors is not None:
        _report(errors)


def _report(errors: TapFunctionException) -> None:
    print(
        "hostcallback: taps raised or checks failed, and no barrier_wait() or receiver reported it:",
        file=sys.stderr,
    )
    traceback.print_exception(errors)
    if environment.EXIT_STATUS.read() and native.available():
        native.load().hcb_fail_exit(EXIT_STATUS)
