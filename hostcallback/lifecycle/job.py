"""The processes of one program, by JAX's coordinator: what travels from one to all, and the names that they share.

A failure of one, and a request to stop, travel to all. Without this, a process that fails waits at its exit for all
others (JAX's barrier, 300 s), and they wait in their collectives for it. Here the process that fails first says so.
Each other one raises that in the thread that runs its programs, or ends with a report where that thread does not come
back. None waits in JAX's barrier then.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import NamedTuple, NoReturn

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.errors import JobError
from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.failures.deferred_errors import DeferredErrors, OnError, watch_aborts
from hostcallback.receiver.failures.failure_report import cause_of
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.runtime.signals import watch_termination
from hostcallback.receiver.text import foreign, say

EVENTS = "hostcallback/events"
"""Below it, the events by their number, from 0 on: all processes see them in one order."""

SEEN = "hostcallback/seen"
"""Below it, the indices of the processes that know of the failure."""

LEFT = "hostcallback/left"
"""Below it, those of the processes that end."""

ASKS_PER_SEC = 500.0
"""Questions a second that the coordinator gets of all processes together."""

ASK_SEC = 0.5, 2.0
"""Fewest and most seconds between two questions of a process."""

RAISE_SEC = 2.5
"""Seconds that the main thread has to come back from its program and to raise the failure by itself."""

STUCK_SEC = 1.0
"""Seconds after which it is given up if it then does not raise what the interpreter is told to raise in it."""

UNWIND_SEC = 60.0
"""Seconds that one call of the main thread may take when it has raised, such as one that saves the state."""

EXIT_SEC = 3.0
"""Seconds for JAX's exit."""

LEAVING_SEC = 0.5
"""Seconds for which the coordinator stays after the last process has said that it leaves."""

ANSWER_SEC = 2.0
"""Seconds for the others to say that they know of the failure."""

LOOK_SEC = 0.1
"""Seconds between two looks."""

EXIT_STATUS = 1
"""The exit status of a process that must end because another one failed."""


def pause_sec(processes: int) -> float:
    """Seconds between two questions that each of `processes` processes asks the coordinator."""
    return min(max(processes / ASKS_PER_SEC, ASK_SEC[0]), ASK_SEC[1])


class Event(NamedTuple):
    """What one process tells all.

    Attributes:
        kind: "failure" or "stop".
        process: its index.
        source_line: of the user, where it failed.
        text: of the failure, or the reason of the request.
    """

    kind: str
    process: int
    source_line: str
    text: str


class Job:
    """This process in its program. Once started, its thread runs as long as the process.

    Attributes:
        failure: the first failure of the program; None while there is none.
    """

    def __init__(self) -> None:
        """Does not listen yet: `start` does."""
        self._lock = threading.RLock()  # protects `_thread` and `_known`; signal handlers may ask
        self._thread: threading.Thread | None = None
        self._known = 0  # events
        self._leaving_at = 0.0
        self._ends = threading.Event()
        self._aborts = False
        self.failure: Event | None = None
        self.on_stop: list[Callable[[str], None]] = []

    def start(self, *, aborts: bool = False) -> None:
        """Listens from now on. Does nothing in a program of one process.

        Args:
            aborts: whether an exception that ends this process is a failure of the program.
        """
        self._aborts |= aborts
        if not compat.has_coordinator() or jax.process_count() == 1:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hostcallback-job", daemon=True)
                self._thread.start()

    def tell(self, kind: str, source_line: str, text: str) -> None:
        """Tells all processes. Any thread. Waits for one round trip to the coordinator."""
        if self._thread is None or self.failure is not None:
            return
        event = Event(kind, jax.process_index(), source_line[:300], text[:2000])
        number = len(compat.shared_below(EVENTS))
        while not compat.share(f"{EVENTS}/{number}", json.dumps(event)):
            if str(number) not in compat.shared_below(
                EVENTS
            ):  # the coordinator is gone, and all processes end
                return
            number += 1
        self.look()

    def tell_uncaught(self, error: BaseException, trace: TracebackType | None) -> None:
        """Tells all processes of an exception that ends this one, if a receiver has `on_error="abort"`."""
        if self._aborts:
            self.tell("failure", _place_of(trace), cause_of(error))

    def _run(self) -> None:
        pause = pause_sec(jax.process_count())
        while compat.has_coordinator() and not self._ends.wait(pause):
            self.look()
            if self.failure is not None and not self._ends.is_set():
                self._guard(self.failure)

    def look(self) -> None:
        """Asks the coordinator for events. Any thread."""
        if self._thread is None or self.failure is not None:
            return
        events = compat.shared_below(EVENTS)
        with self._lock:
            number, self._known = self._known, max(self._known, len(events))
        for each in range(number, len(events)):
            event = Event(*json.loads(events[str(each)]))
            event = event._replace(source_line=foreign(event.source_line), text=foreign(event.text))
            if event.kind == "failure" and self.failure is None:
                self.failure = event
                compat.share(f"{SEEN}/{jax.process_index()}", "")
            elif event.kind == "stop":
                for stop in self.on_stop:
                    stop(f"{event.text} (process {event.process})")

    def _guard(self, failure: Event) -> NoReturn:
        # Until the end of the process, with which this thread ends.
        is_own = failure.process == jax.process_index()
        error = JobError(failure.process, failure.source_line, failure.text)
        pending = None if is_own else _scope_of_programs()
        if pending is not None:
            pending.add_elsewhere(error)
        began = since = told_at = monotonic()
        position, has_raised, is_told = _position(), False, False
        while True:
            threading.Event().wait(LOOK_SEC)
            now, where = monotonic(), _position()
            if where != position:
                position, since = where, now
            if pending is None or is_told:  # it has come back if it has moved
                has_raised |= since > told_at
            else:
                has_raised = not pending.has_elsewhere()
            if self._leaving_at:
                if now > self._leaving_at + EXIT_SEC:
                    _end_process("")
            elif now > since + UNWIND_SEC or (not has_raised and now > began + RAISE_SEC + STUCK_SEC):
                _end_process(
                    f"hostcallback: {error}\nhostcallback: the main thread does not come back from "
                    f"{where[1]}, so this process ends with status {EXIT_STATUS}"
                )
            elif not has_raised and not is_told and now > began + RAISE_SEC:
                is_told, told_at = True, now
                _raise_in_main()

    def leave(self) -> None:
        """Leaves the program if one of its processes failed, so that none waits for others. Main thread, at exit."""
        self._ends.set()
        if self._thread is not None and self.failure is None:
            self._thread.join()  # JAX's exit must not find it in a question to the coordinator
        if self.failure is None or not compat.has_coordinator():
            return
        own = jax.process_index()
        compat.share(f"{LEFT}/{own}", "")
        _name_silent(ANSWER_SEC)
        if own == 0:  # the coordinator is in this process, and JAX aborts those that lose it
            until = monotonic() + UNWIND_SEC
            # Also for those that come to know of the failure meanwhile.
            while not _all_left() and monotonic() < until:
                threading.Event().wait(LOOK_SEC)
            threading.Event().wait(LEAVING_SEC)
        self._leaving_at = monotonic()
        compat.leave_coordinator()

    def after_fork_in_child(self) -> None:
        """Forgets everything in a forked child, which is no process of the program."""
        self.__init__()  # type: ignore[misc]


def _all_left() -> bool:
    # Whether all processes that know of the failure have left.
    return {*compat.shared_below(LEFT)} >= {*compat.shared_below(SEEN)}


def _name_silent(timeout_sec: float) -> None:
    # Says which processes do not know of the failure when the time is up.
    everyone = set(map(str, range(jax.process_count())))
    known = _wait_for_all(SEEN, everyone, timeout_sec)
    silent = ", ".join(map(str, sorted(map(int, everyone - known))))
    if silent:
        say(
            f"hostcallback: process {silent} of this program does not answer: it was killed, cannot be reached, "
            "or runs no taps"
        )


def _wait_for_all(folder: str, wanted: set[str], timeout_sec: float) -> set[str]:
    until = monotonic() + timeout_sec
    while not (found := set(compat.shared_below(folder))) >= wanted and monotonic() < until:
        threading.Event().wait(LOOK_SEC)
    return found


def _scope_of_programs() -> DeferredErrors | None:
    scopes = runtime.current_scopes()
    aborting = [scope for scope in scopes if scope.deferred.on_error is OnError.ABORT]
    return next((scope.deferred for scope in (*aborting, *scopes)), None)


def _position() -> tuple[int, str, int]:
    # Where the main thread is: it stands still while it is in native code.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return 0, "its end", 0
    code = frame.f_code
    return id(frame), f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})", frame.f_lasti


class _JobErrorHere(JobError):
    # The interpreter makes the exception, without arguments.
    def __init__(self) -> None:
        failure = this_job.failure or Event("failure", -1, "an unknown line", "")
        super().__init__(failure.process, failure.source_line, failure.text)


_JobErrorHere.__name__ = _JobErrorHere.__qualname__ = "JobError"
_JobErrorHere.__module__ = JobError.__module__


def _raise_in_main() -> None:
    ident = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_JobErrorHere))


def _end_process(text: str) -> NoReturn:
    if text:
        say(text)
        _name_silent(0.0)
    compat.share(f"{LEFT}/{jax.process_index()}", "")
    watch_termination.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(EXIT_STATUS)


def _place_of(trace: TracebackType | None) -> str:
    # The innermost frame of the user.
    place = "an unknown line"
    while trace is not None:
        code, package = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        if package.partition(".")[0] not in ("jax", "jaxlib", "hostcallback"):
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return place


this_job = Job()
"""Of this process."""

processes.in_child(processes.Stage.PROGRAM, this_job.after_fork_in_child)


def _tell_abort(check: FailedCheck) -> None:
    this_job.tell("failure", check.source_line, f"check failed: {check.explanation.text}")


watch_aborts(_tell_abort)


KEY = "hostcallback/job"
RUN_KEY = "hostcallback/run"
TIMEOUT_SEC = 10.0

_run = ""


def _common_run(own: str) -> str:
    # The name of the run that the first process to ask gave; the own one before jax.distributed is initialized.
    global _run
    if not _run:
        try:
            _run = compat.shared_value(RUN_KEY, own, TIMEOUT_SEC) or ""
        except jax.errors.JaxRuntimeError as error:
            # Kept, so that this process does not change its name when the coordinator answers later.
            _run = own
            logger.warning(
                "the coordinator of jax.distributed does not answer, so this process is a separate run, %s: %s",
                own, str(error).partition("\n")[0],
            )  # fmt: skip
    return _run or own


processes.agree_by(_common_run)


def process_index() -> int | None:
    """Returns the index of this process in a program of several processes; None for a single process."""
    return jax.process_index() if jax.process_count() > 1 else None


def job_id() -> str:
    """Returns the id of this run of the program, equal in all its processes; an empty text for a single process.

    The first process that asks makes the id and stores it at the coordinator of `jax.distributed`, where the others
    read it. Blocks for one round trip to the coordinator.
    """
    if jax.process_count() == 1:
        return ""
    try:
        return compat.shared_value(KEY, uuid.uuid4().hex, TIMEOUT_SEC) or ""
    except jax.errors.JaxRuntimeError as error:
        logger.warning(
            "the coordinator of jax.distributed does not answer, so readers of the log or the collector cannot tell "
            "which processes belong together, and show shards of arrays separately: %s",
            str(error).partition("\n")[0],
        )
        return ""
