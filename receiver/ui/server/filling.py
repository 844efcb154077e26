"""The thread that fills the index: at the start, and while a page is open."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from hostcallback.receiver.log import logger
from hostcallback.receiver.ui.index.log_index import LogIndex

INTERVAL_SEC = 0.5
"""Seconds between looks at the logs while a page is open."""

FIRST_SEC = 0.25
"""Seconds after which the reading of a log is far enough for a first chart."""


LOOK_SEC = 1.0
"""Seconds for which logs with many files are looked at before what was found is read."""


class Filler:
    """Fills an index. Without open pages and requests it does nothing, except for reading what it has found.

    Attributes:
        index: the index.
    """

    def __init__(self, index: LogIndex) -> None:
        """Starts the thread."""
        self.index = index
        self._changed = threading.Condition()
        self._watchers = 0
        self._wanted = True
        self._closed = False
        self._looked = 0
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="hostcallback-ui", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, the logs are looked at every half second."""
        with self._changed:
            self._watchers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def refresh(self) -> None:
        """Lets the logs be looked at if that is long ago, and waits for it, for a moment."""
        with self._changed:
            if time.monotonic() - self._looked_at < INTERVAL_SEC:
                return
            before = self._looked
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._looked != before or self._closed, FIRST_SEC + INTERVAL_SEC)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._wanted and not self.index.pending and not self.index.is_looking:
                    self._changed.wait(INTERVAL_SEC if self._watchers else None)
                    if not self._wanted and not self._watchers:
                        continue
                looks = not self._closed and (
                    self._wanted
                    or self.index.is_looking
                    or time.monotonic() - self._looked_at >= INTERVAL_SEC
                )
                self._wanted = False
            self._work(looks)

    def _work(self, looks: bool) -> None:
        try:
            if looks:
                self.index.look(LOOK_SEC)
            self.index.read_some(FIRST_SEC)
        except Exception:  # a bug, or a hostile log: the page stays up with what was read
            logger.exception("the page's index could not take a part of the log")
        with self._changed:
            if looks:
                self._looked += 1
                self._looked_at = time.monotonic()
            self._changed.notify_all()
