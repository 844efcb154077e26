"""The thread that dispatches the programs on which a barrier waits.

If a device has no place for one more program, a dispatch blocks, and neither Ctrl-C nor a time limit can end it. So
this thread dispatches, and no thread of the user blocks there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from hostcallback.receiver import processes
from hostcallback.receiver.log import logger


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
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

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

    def submit(self, job: Callable[[], None]) -> None:
        """Queues `job` for the thread, which logs its exceptions.

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
            except BaseException:  # a failing job must not end the thread
                logger.exception("a barrier could not find out what runs")
            # The frame of a waiting thread would keep the last job, with the arrays in its closure, alive.
            del job


dispatch_thread = DispatchThread()
"""The dispatch thread of this process."""

processes.in_child(processes.Stage.PROGRAM, dispatch_thread.forget)
