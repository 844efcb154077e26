"""The thread that dispatches what a barrier waits behind.

A device that has no place for one more program keeps a dispatch waiting, and then neither Ctrl-C nor a time limit can
end it. So no thread of the user's waits there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hostcallback.receiver import fork
from hostcallback.receiver.log import logger


class NoThreadError(RuntimeError):
    """The thread cannot be started: the interpreter ends."""


class DispatchError(RuntimeError):
    """A program that a barrier waits for could not be run."""


class DispatchThread:
    """Runs jobs one after the other, on a daemon thread. Its methods may be called by any thread."""

    def __init__(self) -> None:
        """The thread is not started."""
        self.forget()

    def forget(self) -> None:
        """Forgets the thread and its jobs: for a forked child, which has neither."""
        self._lock = threading.RLock()  # protects _thread; a signal handler may wait for taps as well
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(self) -> None:
        """Starts the thread unless it runs.

        Raises:
            NoThreadError: the interpreter ends, and starts none.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hostcallback-dispatch", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise NoThreadError("no thread can be started") from error
                self._thread = thread

    def submit(self, job: Callable[[], None]) -> None:
        """Has the thread call `job` when it is done with those before it. What it raises is logged.

        Raises:
            NoThreadError: as `start` does.
        """
        self.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException:  # whatever it is, the next one is to be called
                logger.exception("a barrier could not find out what runs")
            del job


dispatch_thread = DispatchThread()
"""This process's."""

fork.in_child(fork.Stage.PROGRAM, dispatch_thread.forget)
