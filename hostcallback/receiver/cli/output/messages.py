"""Shows messages of a log as text or JSON, and the progress of reading on a terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Any

from hostcallback.receiver.cli.output.tables import BOLD, CYAN, DIM, RED, YELLOW, has_color, painted
from hostcallback.receiver.sinks.printing import place_text
from hostcallback.receiver.taplog.format.layout import Damage, Kind, Lost
from hostcallback.receiver.taplog.reading import chunk_reader, logged_message, merge, segment_reader
from hostcallback.receiver.taplog.reading.reader import EVERYTHING, LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.taplog.render import as_dict, message_text, process_text, short_text
from hostcallback.receiver.text import printable

VALUE_CHARS = 160
"""Length to which lines of text shorten values."""


class Show:
    """Writes messages to the standard output."""

    def __init__(self, *, as_json: bool, full: bool = False) -> None:
        """`full`: lines of text are not shortened."""
        self._as_json = as_json
        self._limit = None if full else VALUE_CHARS
        self._has_color = not as_json and has_color()
        make_safe()

    def message(
        self,
        logged: logged_message.LoggedMessage,
        *,
        among: Collection[segment_reader.Writer],
        delivered: bool | None = None,
    ) -> None:
        """Writes one message.

        Args:
            logged: the message.
            among: the processes whose messages are shown: the line names the message's one, and its run, among several.
            delivered: whether the message was delivered; None if unknown.
        """
        if self._as_json:
            known = {} if delivered is None else {"delivered": delivered}
            print(json.dumps({**as_dict(logged), **known}, allow_nan=False))
            return
        message = logged.message
        step = "-" if logged.step is None else str(logged.step)
        parts = [
            self._painted(time_text(message.time_ns), DIM),
            *_writer_texts(logged.writer, among),
        ]
        name = self._painted(printable(message.consumer.name), CYAN)
        parts += [printable(message.device), step, name, self._value(logged)]
        if message.shard_index is not None:
            parts.append(" ".join(place_text(place) for place in message.shard_index if place))
        if logged.folded:
            parts.append(f"(and {logged.folded:,} more before it)")
        parts.append(self._painted(printable(message.consumer.source_line), DIM))
        undelivered = [self._painted("not delivered", YELLOW)] if delivered is False else []
        print("  ".join([*parts, *undelivered]))

    def lost(self, run: merge.LostNote, *, among: Collection[segment_reader.Writer]) -> None:
        """Writes a note of lost messages, in the text format only; `among` as for `message`."""
        # Each line of JSON is one message: programs that read them would take a note for a message. A gap in
        # `seq` shows the loss, and `hcb stats` counts it.
        if not self._as_json:
            print(
                "  ".join(
                    [
                        time_text(run.lost.time_ns),
                        *_writer_texts(run.writer, among),
                        printable(run.lost.device),
                        "-",
                        self._painted(lost_text(run.lost), YELLOW),
                    ]
                )
            )

    def _painted(self, text: str, style: str) -> str:
        return painted(text, style) if self._has_color else text

    def _value(self, logged: logged_message.LoggedMessage) -> str:
        try:
            text = message_text(logged)
            if text is None:
                return short_text(logged.value, self._limit)
        except Exception as error:  # one message that cannot be shown must not hide the others
            return f"(cannot be shown: {printable(str(error))})"
        text = printable(text)
        return text if self._limit is None or len(text) <= self._limit else text[: self._limit - 3] + "..."


def _writer_texts(writer: segment_reader.Writer, among: Collection[segment_reader.Writer]) -> Iterator[str]:
    if len({each.run for each in among}) > 1:
        yield printable(writer.run or "-")
    if len(among) > 1:
        yield process_text(writer)


def time_text(time_ns: int) -> str:
    """Local time, to the microsecond."""
    seconds, rest = divmod(time_ns, 10**9)
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}"
    # A damaged or foreign log may have any time.
    except (OverflowError, ValueError, OSError):
        return f"@{time_ns}ns"


def lost_text(lost: Lost) -> str:
    """Describes a note of lost messages in one phrase; if its count is 0, only the reason."""
    if not lost.messages:
        return printable(lost.reason)
    return f"{lost.messages:,} message(s) lost: {printable(lost.reason)}"


def make_safe() -> None:
    """Makes the standard output escape characters that its encoding does not have."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def warning(text: str) -> str:
    """A line for the standard error; the text has to be safe."""
    return f"{painted('hcb:', BOLD, RED) if has_color(sys.stderr) else 'hcb:'} {text}"


def report_damage(damaged: Collection[Damage]) -> int:
    """Reports the damaged parts of a log on standard error; returns the exit status."""
    real = [damage for damage in damaged if not damage.torn]
    for damage in real[:20]:
        print(warning(str(damage)), file=sys.stderr)
    if len(real) > 20:
        print(f"hcb: and {len(real) - 20} more damaged parts", file=sys.stderr)
    return 1 if real else 0


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

    def _records(self, selection: Selection, records: Iterator[merge.Record]) -> Iterator[merge.Record]:
        # Several readers may be read in turns; the bar ends with the last one.
        self._iterations += 1
        try:
            for record in records:
                yield record
                if isinstance(record, merge.Stretch):
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
        chunks = (chunk for chunk in segment.headers() if isinstance(chunk, chunk_reader.Chunk))
        count += sum(chunk.messages for chunk in chunks if chunk.kind is Kind.FRAMES)
    return count
