"""What receivers do at Ctrl-C and at SIGTERM.

The handler of SIGTERM is native, because JAX's own is: `jax.distributed.initialize` replaces the handler that it
finds. Our handler chains to the previous one, and reinstalls itself if another library replaces it.

Python acts on SIGINT when the main thread is back from native code. A thread that waits for a program comes back when
the program ends, and a program whose messages find no room ends when its taps have caught up: after hours, if they
are slow. So a thread of this module, which a native handler wakes, has the receivers leave out messages until the
main thread is back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # see gil_share
import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from hostcallback.receiver import processes
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.dispatch import gil_share
from hostcallback.receiver.text import say

LOOK_SEC = 0.5
"""Seconds between checks whether another library has replaced the handler."""

BACK_SEC = 0.3
"""Seconds that the main thread has to come back by itself."""

POLL_SEC = 0.05
"""Seconds between checks while it does not."""

LET_GO_SEC = 0.4
"""Seconds of leaving out messages after which programs that still wait, behind a stuck tap, are let go."""

ANNOUNCED = (
    "hostcallback: interrupted while the program waits for its taps: {} left out from here on, until the program ends; "
    "another Ctrl-C ends the process at once"
)

AT_PROMPT = (
    "hostcallback: interrupted while the program waits for its taps: {} left out until the program ends"
)


class Interrupted(Protocol):
    """Protocol of the receivers in this module; `Runtime` implements it."""

    def holds_programs(self) -> bool:
        """Whether a program waits for room in a queue or for a host function."""

    def skip_taps(self, on: bool) -> None:
        """Starts or stops skipping messages."""

    def let_go(self, on: bool) -> None:
        """Starts or stops overwriting messages that no thread takes, so that no program waits for room."""

    def describe_backlog(self) -> str:
        """Says how many messages wait, and for which function."""


class Stoppable(Protocol):
    """Protocol of the request to stop; `StopRequest` implements it."""

    @property
    def reason(self) -> str | None:
        """Why; None while there is no request."""

    def make(self, reason: str) -> None:
        """Requests a stop."""

    def is_awaited(self) -> bool:
        """Whether a loop runs that can be stopped."""


def is_interactive() -> bool:
    """Whether the process goes on after Ctrl-C, as a prompt or a notebook does."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


class InterruptWatch:
    """The thread that handles SIGINT while the main thread cannot. Once started, it runs as long as the process."""

    def __init__(self) -> None:
        """Installs no handler: `start` does."""
        self._lock = threading.Lock()  # protects `_thread`
        self._thread: threading.Thread | None = None
        self.exits = False  # the process ends, and the receivers leave out messages until then
        self._stop: Stoppable | None = None
        self._holds = False  # whether the next SIGINT comes here first
        self._has_held = False  # whether one has come that has not been dealt with
        self._write = -1  # the end of the pipe that the handler writes to

    def stops(self, request: Stoppable) -> None:
        """From now on, Ctrl-C while a loop runs that can be stopped makes the request, if there is none yet."""
        if self._stop is None:
            self._stop = request
            if self._thread is not None:
                self._hold_next()

    def start(self, receivers: Interrupted) -> None:
        """Watches from now on. Does nothing if it watches already, or if the native library cannot be loaded."""
        if not native_library.available():
            return
        with self._lock:
            if self._thread is not None:
                return
            read, write = os.pipe()
            os.set_blocking(write, False)  # the handler must not block: a full pipe has woken the thread
            native_library.load().hcb_watch_interrupt(write)
            self._thread = threading.Thread(
                target=self._run, args=(receivers, read, write), name="hostcallback-sigint", daemon=True
            )
            self._thread.start()
            self._write = write
            self._hold_next()

    def after_fork_in_child(self) -> None:
        """Removes the handler in a forked child, which does not have the thread."""
        if self._thread is not None:
            gil_share.set_handler = _signal.signal
            native_library.load().hcb_unwatch_interrupt()
            native_library.load().hcb_hold_interrupt(0)
        self.__init__()  # type: ignore[misc]

    def _run(self, receivers: Interrupted, read: int, write: int) -> None:
        library = native_library.load()
        while True:
            if not select.select([read], [], [], LOOK_SEC)[0]:
                self._hold_next()
            elif os.read(read, 4096) and not self._takes_held() and _is_of_python():
                self._wait_for_main_thread(receivers, read)
            library.hcb_watch_interrupt(write)

    def _hold_next(self) -> None:
        # The signal of the second Ctrl-C, and those for a handler of the user, are not held.
        library = native_library.load()
        if self._stop is not None and self._stop.reason is None and _is_of_python():
            gil_share.set_handler = self._set_handler  # host functions set handlers often
            held, self._holds = self._holds, True
            self._has_held |= not library.hcb_hold_interrupt(1) and held
        elif self._holds and not self._has_held:
            self._has_held = not library.hcb_hold_interrupt(0)
            self._holds = self._has_held

    def _set_handler(self, number: int, handler: Any) -> None:
        # Of Python, in front of which the native one stays.
        _signal.signal(number, handler)
        native_library.load().hcb_watch_interrupt(self._write)

    def _takes_held(self) -> bool:
        # Of a signal that was held: requests a stop, or gives it to Python. Whether it was one.
        if not self._holds or self._stop is None:
            return False
        has_held = not native_library.load().hcb_hold_interrupt(0) or self._has_held
        self._holds = self._has_held = False
        if not has_held:
            return False
        back, until = _main_thread_is_back(), monotonic() + BACK_SEC
        # The main thread may be about to run a program with such a loop.
        while not (awaited := self._stop.is_awaited()) and not back.wait(POLL_SEC) and monotonic() < until:
            pass
        if awaited and _is_of_python():
            self._stop.make("Ctrl-C; another one interrupts")
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return True

    def _wait_for_main_thread(self, receivers: Interrupted, read: int) -> None:
        back = _main_thread_is_back()
        seconds, skips, let_go_at = BACK_SEC, False, math.inf
        library, main_thread = native_library.load(), threading.main_thread().ident or 0
        while not back.wait(seconds):
            seconds = POLL_SEC
            # Python checks for signals, then begins a wait: it sleeps through a signal that came in between, or to
            # another thread.
            library.hcb_end_wait(main_thread)
            if monotonic() > let_go_at and receivers.holds_programs():
                let_go_at = math.inf
                receivers.let_go(True)
            if select.select([read], [], [], 0)[0]:
                if back.is_set():
                    break  # it is the first one of what the main thread does now
                os.read(read, 4096)
                if skips and not is_interactive():
                    # The C function: Python's `signal.signal` works on the main thread only.
                    ctypes.CDLL(None).signal(signal.SIGINT, None)  # the default action
                    os.kill(os.getpid(), signal.SIGINT)
            if not skips and receivers.holds_programs():
                skips, let_go_at = True, monotonic() + LET_GO_SEC
                text = AT_PROMPT if is_interactive() else ANNOUNCED
                say(text.format(f"{receivers.describe_backlog()} and those behind are"))
                receivers.skip_taps(True)
                if not back.is_set() and select.select([read], [], [], 0)[0]:
                    os.read(read, 4096)  # came before this text, and ends nothing
        if skips and not self.exits:
            receivers.skip_taps(False)
            receivers.let_go(False)


def _is_of_python() -> bool:
    # A handler of the user's may want the program to end as usual, for example to save its state.
    handler = signal.getsignal(signal.SIGINT)
    held = getattr(handler, "__self__", None)
    if isinstance(held, gil_share.HeldInterrupts):
        return held.are_of_python
    return handler is signal.default_int_handler


def _main_thread_is_back() -> threading.Event:
    # Set when the main thread runs pending calls, as it does between two steps of Python: then it can raise
    # KeyboardInterrupt itself. Set at once if there are too many such calls.
    back = threading.Event()

    def note(_: object) -> int:
        back.set()
        return 0

    pending = _PENDING(note)
    _pending_calls.append(pending)
    if ctypes.pythonapi.Py_AddPendingCall(pending, None):
        back.set()
    return back


_pending_calls: list[Any] = []  # never freed, because the interpreter may call them at any time: one a Ctrl-C
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

watch_interrupt = InterruptWatch()
"""The watch of this process."""

processes.in_child(processes.Stage.RUNTIME, watch_interrupt.after_fork_in_child)


GRACE_SEC = 5.0
"""Seconds that the collector has to acknowledge the messages."""

ON_THE_WAY_SEC = 0.05
"""Seconds after which a message that a device had begun to emit before the signal is in its queue. Its thread may have
lost its core between reading the clock and taking a place in the queue."""

LAST_SEC = 0.2
"""Seconds that receivers have to read such messages."""


class Drains(Protocol):
    """What is flushed at SIGTERM: a recorder, a forwarder, or the writers of metrics of a receiver."""

    def drain(self, timeout_sec: float) -> bool:
        """Writes queued messages and waits until the collector has stored them; False if the time is over first."""


class SigtermFlusher:
    """The thread that flushes outputs at SIGTERM. Once started, it runs as long as the process.

    Attributes:
        deliver: waits at most the given seconds until receivers have delivered all emitted messages.
        unwritten: after a drain, says how many records the writers of metrics were not given time for; a text for each.
    """

    def __init__(self) -> None:
        """Installs no handler: `add` does."""
        self.deliver: Callable[[float], Any] = lambda timeout_sec: None
        self.unwritten: Callable[[], list[str]] = list
        self._forget()

    def _forget(self) -> None:
        self._stop: Stoppable | None = None  # of the next signal, which only makes this request
        self._lock = threading.Lock()  # protects everything below
        self._flushed: weakref.WeakSet[Drains] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, flushed: Drains) -> None:
        """Flushes an output at SIGTERM as long as it lives. Does nothing if the native library cannot be loaded."""
        if self._thread is None and not native_library.available():
            return
        with self._lock:
            self._flushed.add(flushed)
            self._start()

    def stop_by(self, request: Stoppable) -> bool:
        """Has the next SIGTERM make a request, and nothing else. False if the native library cannot be loaded."""
        if not native_library.available():
            return False
        with self._lock:
            self._stop = request
            self._start()
        return True

    def _start(self) -> None:
        # The caller holds the lock.
        if self._thread is not None:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)  # the handler must not block: a full pipe has woken the thread already
        ends = native_library.load().hcb_watch_termination(write)
        self._thread = threading.Thread(
            target=self._run, args=(read, write, ends), name="hostcallback-sigterm", daemon=True
        )
        self._thread.start()

    def remove(self, flushed: Drains) -> None:
        """Flushes it no longer."""
        with self._lock:
            self._flushed.discard(flushed)

    def after_fork_in_child(self) -> None:
        """Removes the handler in a forked child, which does not have the thread."""
        if self._thread is not None:
            native_library.load().hcb_unwatch_termination()
        self._forget()

    def _run(self, read: int, write: int, ends: int) -> None:
        library = native_library.load()
        while True:
            ready, _, _ = select.select([read], [], [], LOOK_SEC)
            if ready:
                os.read(read, 4096)
            if ready and self._stop is not None:
                request, self._stop = self._stop, None
                request.make("SIGTERM; another one ends the process")
            elif ready:
                self.flush()
                if ends:  # the default action was replaced: end the process as it would have
                    library.hcb_unwatch_termination()
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            # Again, since another library may have replaced the handler; LOOK_SEC limits how long that goes
            # unnoticed.
            ends = library.hcb_watch_termination(write)

    def flush(self) -> None:
        """Delivers what has been emitted, and writes and forwards it. Takes some seconds at most. Any thread."""
        if not self._items():
            return
        try:
            self.deliver(GRACE_SEC)
        except TapTimeoutError as error:
            logger.error("at SIGTERM: %s", error)
        except Exception:  # what has been read is written all the same
            logger.exception("at SIGTERM the emitted messages could not be waited for")
        self._drain(GRACE_SEC)
        # The program runs meanwhile. What it has emitted since, and what it was emitting when the signal came, is
        # written too, so that the log and the spool end at the same message.
        threading.Event().wait(ON_THE_WAY_SEC)
        with contextlib.suppress(Exception):  # reported above
            self.deliver(LAST_SEC)
        self._drain(0.0)
        left = self.unwritten()
        if left:
            say(f"hostcallback: at SIGTERM these were left out: {'; '.join(left)}")

    def _items(self) -> list[Drains]:
        with self._lock:
            return list(self._flushed)

    def _drain(self, timeout_sec: float) -> None:
        for item in self._items():
            try:
                item.drain(timeout_sec)
            except (
                Exception
            ):  # the others are flushed all the same, and the signal must still have its effect
                logger.exception("not all messages could be written or forwarded at SIGTERM")


watch_termination = SigtermFlusher()
"""The flusher of this process."""

processes.in_child(processes.Stage.REMOTE, watch_termination.after_fork_in_child)
