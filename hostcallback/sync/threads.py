"""Threads that dispatch programs: the barriers' own, the users' (census), and programs that can be held back.

If a device has no slot for one more program, a dispatch blocks, and neither Ctrl-C nor a time limit can end it. So
barriers dispatch on a thread of this module, and no thread of the user blocks there.

JAX dispatches without calling this library. But only threads with a Python thread state dispatch, CPython numbers
these states in the order of their creation, and a thread that has used no processor time has dispatched no program.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.runtime import runtime


class NoThreadError(RuntimeError):
    """The thread cannot be started, because the interpreter is shutting down."""


class DispatchError(RuntimeError):
    """A program on which a barrier waits could not be run."""


class DispatchThread:
    """Runs jobs one after the other, on a daemon thread. Its methods may be called by any thread."""

    def __init__(self) -> None:
        """Does not start the thread."""
        self.forget()

    def forget(self) -> None:
        """Drops the thread and its jobs, for a forked child, which has neither."""
        self._lock = threading.RLock()  # protects _thread; a signal handler may wait for taps as well
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[tuple[Callable[[], None], bool]] = SimpleQueue()
        self._left = self._to_compile = 0  # jobs that have not ended, and those of them that compile

    @property
    def at_work(self) -> tuple[threading.Thread, ...]:
        """The thread if it has a job, else nothing."""
        return (self._thread,) if self._left and self._thread is not None else ()

    @property
    def is_compiling(self) -> bool:
        """Whether a job of it compiles programs, now or soon."""
        return self._to_compile > 0

    def start(self) -> None:
        """Starts the thread if it does not run.

        Raises:
            NoThreadError: the interpreter is shutting down.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hostcallback-dispatch", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise NoThreadError("no thread can be started") from error
                # Only once it runs: otherwise a failed start would make all later jobs wait without end.
                self._thread = thread

    def submit(self, job: Callable[[], None], *, compiles: bool = False) -> None:
        """Queues `job` for the thread, which logs its exceptions. `compiles`: whether it compiles programs.

        Raises:
            NoThreadError: as `start` does.
        """
        self.start()
        with self._lock:
            self._left += 1
            self._to_compile += compiles
        self._jobs.put((job, compiles))

    def _run(self) -> None:
        while True:
            job, compiles = self._jobs.get()
            try:
                job()
            except BaseException:  # a failing job must not end the thread
                logger.exception("a barrier could not find out what runs")
            finally:
                with self._lock:
                    self._left -= 1
                    self._to_compile -= compiles
            # The frame of a waiting thread would keep the last job, with the arrays in its closure, alive.
            del job


dispatch_thread = DispatchThread()
"""The dispatch thread of this process."""

processes.in_child(processes.Stage.PROGRAM, dispatch_thread.forget)


MAX_STATES = 1024
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
        # Equal processor time means that the thread has run nothing since, so it has dispatched nothing.
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
    ids, made = (ctypes.c_uint64 * MAX_STATES)(), ctypes.c_uint64()
    count = native_library.load_holding_lock().hcb_thread_states(ids, MAX_STATES, made)
    if not 0 <= count <= MAX_STATES:
        return None, made.value
    return frozenset(ids[:count]), made.value


HOLD_SEC = 5.0
"""Seconds for which a daemon thread is held: an exit handler may wait for it."""

HOLD_WITHIN_SEC = 1.0
"""Seconds to wait for daemon threads that run, or wait for the interpreter lock."""

COMPILED_WITHIN_SEC = 10.0
"""Seconds to wait for daemon threads that are in JAX's own Python code, such as a first call, which compiles."""

SAMPLE_SEC = 0.01

IDLE_SEC = 0.5
"""Seconds without work of any other thread of the process after which nothing is being compiled."""


def hold_daemon_threads() -> None:
    """Holds the user's daemon threads in their next call of a jitted function, because the process ends.

    Python ends a daemon thread where it next asks for the interpreter lock, by unwinding its stack. Where that is in
    JAX's C++ code, the process aborts ("FATAL: exception not rethrown", before Python 3.14). A held thread does not
    ask. Waits until these threads are held or asleep, and until the dispatch thread has left JAX and compiled the
    programs of barriers, with limits; returns at once if there are none.
    """
    users = filter(_is_users_daemon, threading.enumerate())
    threads = [thread for thread in (*dispatch_thread.at_work, *users) if thread.ident not in _hold.given_up]
    if not threads:
        return
    _hold.begin()
    began = worked_at = time.perf_counter()
    others_sec = time.process_time() - time.thread_time()
    while (waited := time.perf_counter() - began) < COMPILED_WITHIN_SEC:
        before = [_sleep_of(thread) for thread in threads]
        time.sleep(SAMPLE_SEC)
        frames = sys._current_frames()
        free = [
            (thread, sleep)
            for thread, sleep in zip(threads, before, strict=True)
            if thread.is_alive() and not _hold.holds(thread.ident)
        ]
        if time.process_time() - time.thread_time() - others_sec > 1e-3:
            others_sec, worked_at = time.process_time() - time.thread_time(), time.perf_counter()
        in_jax = time.perf_counter() - worked_at < IDLE_SEC and any(
            (dispatch_thread.is_compiling and thread in dispatch_thread.at_work)
            or _is_in_jax(frames.get(thread.ident or 0))
            for thread, _ in free
        )
        runs = any(sleep is None or sleep != _sleep_of(thread) for thread, sleep in free)
        if not in_jax and not (runs and waited < HOLD_WITHIN_SEC):
            return
    _hold.given_up.update(thread.ident for thread, _ in free)


class _Hold:
    # Holds each of the user's daemon threads once after each `begin`.

    def __init__(self) -> None:
        self._until: dict[int | None, float] = {}
        self._begun = False
        self.given_up: set[int | None] = set()  # threads that are not waited for again

    def begin(self) -> None:
        self._until = {ident: end for ident, end in self._until.items() if time.perf_counter() < end}
        if not self._begun:
            self._begun = True
            compat.call_after_each_dispatch(self._hold)

    def holds(self, ident: int | None) -> bool:
        return time.perf_counter() < self._until.get(ident, 0.0)

    def _hold(self) -> None:
        ident = threading.get_ident()
        if ident not in self._until and _is_users_daemon(threading.current_thread()):
            self._until[ident] = time.perf_counter() + HOLD_SEC
            if native_library.available():
                native_library.load().hcb_hold_thread(int(HOLD_SEC * 1e9))
            else:  # a thread that wakes up while the interpreter ends may abort the process
                time.sleep(HOLD_SEC)


_hold = _Hold()


def _sleep_of(thread: threading.Thread) -> tuple[str, int | None] | None:
    # What stays the same while a thread sleeps; None while it runs. A thread that waits for the interpreter lock wakes
    # up again and again.
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(
            encoding="utf-8", errors="replace"
        )
        if status.partition("\nState:")[2].split()[0] not in "SD":
            return None
        return status.partition("\nvoluntary_ctxt_switches:")[2], _processor_ns(thread)
    return "", _processor_ns(thread)  # without /proc


def _is_in_jax(frame: FrameType | None) -> bool:
    frames = traceback.walk_stack(frame) if frame is not None else ()
    return any(frame.f_code.co_filename.startswith(_JAX) for frame, _ in frames)


_JAX = os.path.dirname(jax.__file__) + os.sep


def _is_users_daemon(thread: threading.Thread) -> bool:
    return thread.daemon and thread is not threading.main_thread() and not thread.name.startswith(OURS)


TARGET = "hostcallback_hold"
OPERAND_SIZE = 4096
"""Elements of the operand. XLA runs a program with less work on the dispatching thread."""


def begin() -> None:
    """Makes programs of `held_program` wait from now on."""
    native_library.load().hcb_hold_begin()


class Held(NamedTuple):
    """What `end` found.

    Attributes:
        on: whether programs were being held.
        blocked_beginner: whether one ran on the thread that called `begin`, which then waited for it: the device
            dispatches synchronously.
    """

    on: bool
    blocked_beginner: bool


def end() -> Held:
    """Lets these programs go on."""
    found = native_library.load().hcb_hold_end()
    return Held(bool(found & native_library.HOLD_ON), bool(found & native_library.HOLD_HELD_BEGINNER))


def barrier_copy(x: jax.Array) -> jax.Array:
    """The program that barriers run: a copy, because XLA:CPU makes no code for it, which takes as long as the rest."""
    return jnp.copy(x)


@functools.cache
def held_program(device: jax.Device) -> Callable[[], Any]:
    """Returns a function that dispatches a program and returns its result, a uint8 scalar.

    The program ends at once, or waits if `begin` was called.
    """
    # Compiled ahead of time, so that it is not traced again under the user's settings of JAX.
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(native_library.load().hcb_hold), platform="cpu")
    flag = jax.ShapeDtypeStruct((), np.dtype(np.uint8))

    def hold(x: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, flag, has_side_effect=True)(jnp.sum(x))

    with jax.disable_jit(False), jax.transfer_guard("allow"):
        operand = jax.device_put(np.zeros(OPERAND_SIZE, np.float32), device)
        compiled = jax.jit(hold).lower(operand).compile()
    return functools.partial(compiled, operand)


def forget() -> None:
    """Drops compiled programs, for a forked child, which has none of its parent's threads."""
    held_program.cache_clear()
    compat.keep_compiler_threads()


processes.in_child(processes.Stage.PROGRAM, forget)
