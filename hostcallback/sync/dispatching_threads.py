"""Finds the threads that may have dispatched programs since a barrier last waited for all of them.

JAX dispatches without calling this library. But only threads with a Python thread state dispatch, CPython numbers
these states in the order of their creation, and a thread that has used no processor time has dispatched no program.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from hostcallback.receiver.native import bindings
from hostcallback.receiver.runtime.runtime import runtime

MOST_STATES = 1024
"""Number of thread states that are examined. With more, other threads always count as possible dispatchers."""

OURS = "hostcallback-"
"""Prefix of the names of this library's threads. They dispatch no programs, except for receivers' tap functions."""


class Census(NamedTuple):
    """The threads of this process at one moment.

    Attributes:
        made: number of the thread state that was made last.
        states: numbers of the existing thread states; None if there are too many or they are not known.
        processor_ns: processor time of each thread in ns, by `threading.get_ident`, where it is known.
        suspects: idents of the threads that may have dispatched programs since the last complete wait; None if it is
            not known which threads did.
    """

    made: int
    states: frozenset[int] | None
    processor_ns: Mapping[int, int]
    suspects: frozenset[int] | None


class DispatchingThreads:
    """Keeps track of threads from one barrier to the next. Any thread, and signal handlers."""

    def __init__(self) -> None:
        """Starts without a census, so that the suspects of the first `count` are not known."""
        self._since = _census(None)

    def count(self) -> Census:
        """Returns a census. Suspects are the calling thread and the receivers; None if other threads have run."""
        return _census(self._since)

    def waited(self, census: Census) -> None:
        """Notes that all programs dispatched before that census have ended."""
        if census.made > self._since.made:  # if several threads waited at a time, the latest census counts
            self._since = census


def _census(since: Census | None) -> Census:
    states, made = _thread_states()
    frames = frozenset(sys._current_frames())
    # Does not use `threading.enumerate`: if a signal handler calls a barrier while its thread holds that function's
    # lock, it would deadlock.
    threads: Mapping[int, threading.Thread] = dict(threading._active)  # type: ignore[attr-defined]
    receivers = {receiver.thread for receiver in runtime.receivers()}
    here = threading.get_ident()
    suspects, used, others_ran = {here}, {}, False
    for ident in frames - {here}:
        thread = threads.get(ident)
        if thread is not None and thread.name.startswith(OURS):
            if thread in receivers:
                suspects.add(ident)
            continue
        nanoseconds = _processor_ns(thread)
        if nanoseconds is not None:
            used[ident] = nanoseconds
        # = since|Equal processor time means that the thread has run nothing since, so it has dispatched
        # nothing.
        others_ran |= since is None or nanoseconds is None or since.processor_ns.get(ident) != nanoseconds
    known = (
        since is not None
        and not others_ran
        and states is not None
        and states == since.states
        and made == since.made + 1
        and len(states) == len(frames)  # otherwise one of the threads runs no Python code now
    )
    return Census(made, states, used, frozenset(suspects) if known else None)


def _processor_ns(thread: threading.Thread | None) -> int | None:
    if thread is None or thread.native_id is None:
        return None
    # The Linux clock id of a thread's processor time; for an ended thread the call fails.
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~thread.native_id << 3) | 6)
    return None


def _thread_states() -> tuple[frozenset[int] | None, int]:
    ids, made = (ctypes.c_uint64 * MOST_STATES)(), ctypes.c_uint64()
    count = bindings.load_holding_lock().hcb_thread_states(ids, MOST_STATES, made)
    if not 0 <= count <= MOST_STATES:
        return None, made.value
    return frozenset(ids[:count]), made.value
