"""A progress bar for commands that read logs for long: on a terminal, on the standard error, after a second."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from hostcallback.receiver.taplog.format.layout import Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.merge import MessageRun, Record
from hostcallback.receiver.taplog.reading.reader import EVERYTHING, LogReader
from hostcallback.receiver.taplog.reading.selection import Selection

DELAY_SEC = 1.0
"""Seconds without a bar: most commands have ended by then."""


class ReadingProgress:
    """Counts what is read of some logs, and shows it by tqdm. Without tqdm, or a terminal, nothing is shown."""

    def __init__(self, *, by_device: bool = False) -> None:
        """No log is read yet; `by_device`: all are read, a device at a time."""
        self._by_device = by_device
        self._since = time.monotonic()
        self._readers: list[LogReader] = []
        self._counted = 0
        self._iterations = 0
        self._bar: Any = None

    def watch(self, reader: LogReader) -> None:
        """Counts what a reader reads from now on."""
        self._readers.append(reader)
        reader.watch = self._records

    def _records(self, selection: Selection, records: Iterator[Record]) -> Iterator[Record]:
        # Several readers may be read in turns; the bar ends with the last one.
        self._iterations += 1
        try:
            for record in records:
                yield record
                if isinstance(record, MessageRun):
                    self._count(record.stop - record.start, selection)
        finally:
            self._iterations -= 1
            if self._bar is not None and not self._iterations:
                self._bar.close()
                self._bar = None

    def _count(self, messages: int, selection: Selection) -> None:
        self._counted += messages
        if self._bar is not None:
            self._bar.update(messages)
        elif time.monotonic() - self._since > DELAY_SEC:
            self._bar = self._make_bar(selection)

    def _make_bar(self, selection: Selection) -> Any:
        from tqdm import tqdm  # here, because most commands need none

        # Which messages of a chunk are selected is known when it is read.
        asked = dataclasses.replace(selection, devices=()) if self._by_device else selection
        total = sum(map(_messages, self._readers)) if asked == EVERYTHING else None
        return tqdm(
            initial=self._counted, total=total, unit=" messages", desc="hcb", file=sys.stderr, leave=False,
            dynamic_ncols=True, mininterval=0.2,
        )  # fmt: skip


def show_progress(*readers: LogReader, prints: bool = False, by_device: bool = False) -> None:
    """Shows how far the readers have come.

    Args:
        readers: of the logs.
        prints: whether the command prints while it reads: on a terminal, that is its progress.
        by_device: whether it reads all devices one after the other.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" or (prints and sys.stdout.isatty()):
        return
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return
    progress = ReadingProgress(by_device=by_device)
    for reader in readers:
        progress.watch(reader)


def _messages(reader: LogReader) -> int:
    count = 0
    for _, segment in reader.segments():
        chunks = (chunk for chunk in segment.headers() if isinstance(chunk, Chunk))
        count += sum(chunk.messages for chunk in chunks if chunk.kind is Kind.FRAMES)
    return count
