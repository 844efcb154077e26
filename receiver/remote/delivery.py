"""Delivers what a collector has stored to its consumers, behind the storing: a thread that reads the files."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from receiver.consumer import Sink
from receiver.deferred import OnError
from receiver.described import Described
from receiver.failed_checks import FailedCheck
from receiver.log import logger
from receiver.remote.cursor import Cursor
from receiver.remote.store import Store
from receiver.remote.stored_runs import StoredRuns
from receiver.remote.stream import Position, StreamKey
from receiver.remote.stream_printer import CHECKS, PRINTS, StreamPrinter
from receiver.run_delivery import RunDelivery
from receiver.scope import Scope
from receiver.steps import step_place
from receiver.taplog.errors import Damage, Lost
from receiver.taplog.merge import Run
from receiver.taplog.selection import Selection

TURN_BYTES = 1 << 20
"""So much of one stream is delivered before it is another one's turn."""

SAVE_SEC = 1.0
MAX_LINES = 10_000
EVERYTHING = Selection()

OnLost = Callable[[StreamKey, Lost], Any]


class _Delivered:
    # One stream.

    def __init__(self, runs: StoredRuns, delivery: RunDelivery) -> None:
        self.runs = runs
        self.delivery = delivery


class Delivery:
    """The consumers of a collector, fed by one thread.

    Attributes:
        scope: accounts for what is delivered, over all processes.
        lost: messages that streams say are missing, by reason.
    """

    def __init__(
        self,
        store: Store,
        *,
        bind: Mapping[str, Callable[..., Any]] | None = None,
        sinks: Sequence[Sink] = (),
        prints: bool = True,
        everything: bool = False,
    ) -> None:
        """Starts the thread with what is stored and was not delivered.

        Args:
            store: where streams are stored.
            bind: functions by the names, or patterns of names, of the taps whose messages they take.
            sinks: get every message.
            prints: whether what prints is printed.
            everything: whether all messages are.
        """
        self._store = store
        self._bind = dict(bind or {})
        self._sinks = tuple(sinks)
        self._prints = prints
        self._everything = everything
        self._cursor = Cursor(store.directory)
        self._streams: dict[StreamKey, _Delivered] = {}
        self.scope = Scope("collector", MAX_LINES, on_error=OnError.WARN)
        self.lost: Counter[str] = Counter()
        self._changed = threading.Condition()  # protects what follows
        self._grown: dict[StreamKey, Position] = {}
        self._stop = False
        self._busy = False
        for key, position in store.stored().items():
            if position > self._cursor.position(key):
                self._grown[key] = position
        self._thread = threading.Thread(target=self._run, name="hostcallback-delivery", daemon=True)
        self._thread.start()

    def grown(self, key: StreamKey, position: Position) -> None:
        """More of a stream is stored. Any thread; does not wait."""
        with self._changed:
            self._grown[key] = position
            self._changed.notify_all()

    def wait_idle(self, timeout_sec: float) -> bool:
        """Waits until all that is stored has been delivered; whether it has in that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._grown and not self._busy, timeout_sec)

    def failed_checks(self) -> list[FailedCheck]:
        """The checks that failed in any process, by line, the first failure first."""
        return self.scope.deferred.checks()

    def close(self, timeout_sec: float = 60.0) -> None:
        """Delivers what is stored, and ends the thread."""
        self.wait_idle(timeout_sec)
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(timeout_sec)

    def _run(self) -> None:
        save_at = time.monotonic() + SAVE_SEC
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stop or self._grown, SAVE_SEC)
                turn, self._grown = self._grown, {}
                self._busy = bool(turn)
                stop = self._stop
            for key, stored in turn.items():
                try:
                    again = self._deliver(key, stored)
                except Exception:  # whatever is wrong with one stream, the others are to be delivered
                    logger.exception("messages of %s cannot be delivered", key)
                    again = False
                if again:
                    with self._changed:
                        self._grown.setdefault(key, stored)
            self._report()
            if stop or time.monotonic() >= save_at:
                save_at = time.monotonic() + SAVE_SEC
                self._save()
            if stop:
                return

    def _deliver(self, key: StreamKey, stored: Position) -> bool:
        # Whether there is more.
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._make(key)
        before = stream.runs.position
        for record in stream.runs.read(stored, TURN_BYTES):
            if isinstance(record, Run):
                stream.delivery.deliver(record)
            elif isinstance(record, Damage):
                if not record.torn:
                    logger.warning("%s: %s", key, record)
            else:
                self._note_lost(key, record.lost)
        self._cursor.move(key, stream.runs.position)
        return before != stream.runs.position and stream.runs.position < stored

    def _make(self, key: StreamKey) -> _Delivered:
        folder = self._store.folder(key.run)
        runs = StoredRuns(
            lambda number: folder / key.segment_name(number), self._cursor.position(key), self._wants
        )
        sinks = list(self._sinks)
        if self._prints or self._everything:
            sinks.append(StreamPrinter(key.process, runs.local_device, everything=self._everything))
        label = f"{key.run} p{key.process} "
        delivery = RunDelivery(
            self.scope,
            EVERYTHING,
            bind=self._bind,
            sinks=sinks,
            printers=False,
            checks_only=not sinks and not self._bind,
            label=lambda writer: label,
        )
        return _Delivered(runs, delivery)

    def _wants(self, described: Described) -> bool:
        if self._everything or self._sinks or described.kind in CHECKS:
            return True
        if self._prints and (described.kind in PRINTS or step_place(described) is not None):
            return True  # steps are printed, too
        return any(fnmatchcase(described.name, pattern) for pattern in self._bind)

    def _note_lost(self, key: StreamKey, lost: Lost) -> None:
        self.lost[lost.reason] += lost.messages
        logger.warning(
            "%s: %d message(s) of %s, %d to %d, are missing: %s",
            key, lost.messages, lost.device, lost.first_seq, lost.last_seq, lost.reason,
        )  # fmt: skip

    def _report(self) -> None:
        checks = self.scope.deferred.take_checks()
        report = self.scope.deferred.take()
        self.scope.deferred.put_back(checks)
        for error in () if report is None else report.exceptions:
            notes = "; ".join(getattr(error, "__notes__", []))
            logger.error("%s: %s%s", type(error).__name__, error, f" ({notes})" if notes else "")

    def _save(self) -> None:
        try:
            self._cursor.save()
        except OSError as error:
            logger.warning("how far was delivered cannot be written down: %s", error)
