"""Which threads may have dispatched programs since barriers last waited for all of them.

JAX dispatches without calling anything of ours. But only threads with a Python thread state dispatch, CPython numbers
these states as they are made, and a thread that has used no processor time has dispatched nothing.
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
"""Thread states that are looked at; in a process with more of them, others may always have dispatched something."""

OURS = "hostcallback-"
"""How the names of this library's threads begin. But for receivers, whose tap functions may, they dispatch nothing."""


class Census(NamedTuple):
    """The threads of this process at one moment.

    Attributes:
        made: the number of the thread state that was made last.
        states: the numbers of those that there are; None if there are too many, or it cannot be told.
        processor_ns: what each thread has used of a processor, by `threading.get_ident`, where that can be told.
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
        """As if no thread had dispatched anything so far."""
        self._since = _census(None)

    def count(self) -> Census:
        """The threads now. Suspects are the calling one, and receivers'; if others have run, they are unknown."""
        return _census(self._since)

    def waited(self, census: Census) -> None:
        """Notes that all programs are over that any thread dispatched before that census."""
        if census.made > self._since.made:  # of several threads that waited at a time, the last one
            self._since = census


def _census(since: Census | None) -> Census:
    states, made = _thread_states()
    frames = frozenset(sys._current_frames())
    # Without the lock of `threading.enumerate`, which a signal handler's barrier could wait for in vain.
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
        others_ran |= since is None or nanoseconds is None or since.processor_ns.get(ident) != nanoseconds
    known = (
        since is not None
        and not others_ran
        and states is not None
        and states == since.states
        and made == since.made + 1
        and len(states) == len(frames)  # else one of them is in no Python code, now
    )
    return Census(made, states, used, frozenset(suspects) if known else None)


def _processor_ns(thread: threading.Thread | None) -> int | None:
    if thread is None or thread.native_id is None:
        return None
    # The number of Linux for the processor clock of a thread; that of one that has ended is an error.
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~thread.native_id << 3) | 6)
    return None


def _thread_states() -> tuple[frozenset[int] | None, int]:
    ids, made = (ctypes.c_uint64 * MOST_STATES)(), ctypes.c_uint64()
    count = bindings.load_holding_lock().hcb_thread_states(ids, MOST_STATES, made)
    if not 0 <= count <= MOST_STATES:
        return None, made.value
    return frozenset(ids[:count]), made.value
