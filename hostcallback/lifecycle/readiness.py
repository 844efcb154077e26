"""Makes everything that waits for a result wait for the output of its program, under `accelerate`.

On the CPU, JAX has called the callbacks of a program, and printed its lines, by the time its results are ready. A
program that then closes a progress bar or a file, or reads what was printed, would do so too early, because our
callbacks run later.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from time import perf_counter

from hostcallback import _jax_compat as compat
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.runtime import POLL_SEC, runtime
from hostcallback.receiver.sources.settled import settled

STALL_SEC = 5.0
"""Seconds for which a wait for a result waits for one callback. The callback may wait for a lock of the waiting
thread."""

_undo: list[Callable[[], None]] = []
_told: set[str] = set()  # source lines of the slow callbacks that were logged


def begin() -> None:
    """Makes waits for results wait for output. Must not be called twice before `end`."""
    try:
        _undo.append(compat.extend_waits(_wait_for_output, settled().is_settled))
        _undo.append(_wait_in_buffers())
    except LookupError as error:
        logger.warning(
            "%s under hcb.accelerate(), since this JAX or Python is not known: %s. Use jax.effects_barrier(). Update "
            "hostcallback",
            "numpy.asarray(x) does not wait for callbacks"
            if _undo
            else "waits for results do not wait for callbacks",
            error,
        )


def end() -> None:
    """Restores JAX's waits."""
    while _undo:
        _undo.pop()()


def _wait_in_buffers() -> Callable[[], None]:
    if not native_library.available():
        raise LookupError("the native library is missing")
    slot, library = compat.get_buffer_slot(), native_library.load_holding_lock()
    original = slot.value
    ours = ctypes.cast(library.hcb_buffer, ctypes.c_void_p).value
    if original != ours:  # otherwise the slot was left alone at the last `end`
        library.hcb_buffer_waits(original, _WAIT_IN_BUFFER)
        slot.value = ours

    def undo() -> None:
        if slot.value == ours:
            slot.value = original

    return undo


def _wait_in_buffer() -> None:
    # Native code, which no exception can pass, calls this, and interrupts the thread once it is back in Python, unless
    # the last line has run: also after an interrupt that Python raises before the first line.
    try:
        _wait_for_output()
    except KeyboardInterrupt:
        return
    except BaseException:
        logger.exception("numpy.asarray does not wait for callbacks")
    native_library.load_holding_lock().hcb_waited()


_WAIT_IN_BUFFER = native_library.Wait(_wait_in_buffer)


def _wait_for_output() -> None:
    # All messages of programs whose results are ready have been emitted. Later messages of programs that still run are
    # not waited for.
    if not _undo or runtime.serves(threading.current_thread()):
        return
    emissions = settled().emissions()
    targets = [(r, r.source.counters().emitted) for r in runtime.receivers() if r.queued()]
    if targets and compat.in_callback_of_jax():  # the program that waits for it may be one of a tap function
        return
    stalled = [receiver.name for receiver, emitted in targets if not _wait_for(receiver, emitted)]
    if not stalled:
        settled().settle(emissions)


def _wait_for(receiver: DeviceReceiver, emitted: int) -> bool:
    seen, since = receiver.progress(), perf_counter()
    while not receiver.wait_consumed(emitted, POLL_SEC):
        now = perf_counter()
        # Progress restarts the time: the limit is for one callback, not for all of them.
        if (found := receiver.progress()) != seen:
            seen, since = found, now
        running = receiver.running_tap()
        stalled_sec = max(now - since, 0.0 if running is None else running[1])
        if stalled_sec > STALL_SEC:
            line = receiver.name if running is None else running[0].source_line
            if line not in _told:
                _told.add(line)
                logger.warning(
                    "a wait for a result stops waiting for the emitted messages: %s. The callback may wait for a "
                    "lock of the waiting thread; jax.effects_barrier() waits without this limit",
                    receiver.describe_wait(),
                )
            return False
    return True
