"""The stream of printed texts, log records and failures: pages of lines, searches, and which lines are wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks import described_template
from hostcallback.receiver.sinks.metric_writers.reduction import TEXT, TapLayout
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, MessageDecoder
from hostcallback.receiver.taplog.render import message_text, process_text, short_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index.block_reader import has_texts
from hostcallback.receiver.ui.index.log_index import LogIndex, Origin
from hostcallback.receiver.wire.tap_descriptor import METRICS, TapDescriptor

SHOWN = "print", "log", "warning", "error", "progress"
"""What a client may ask for: printed texts, log records, log records from WARNING on with failures, from ERROR on with
failures, progress."""

FAILURES = "check", "nonfinite"


class TextFilter(NamedTuple):
    """Conditions on lines of text. Empty and None allow everything.

    Attributes:
        search: text that a line or its tap's name contains, in any case.
        run: name of the run.
        show: one of `SHOWN`.
        process: as lines name it.
        device: as lines name it.
        place: text that the source line contains, such as `train.py:31`.
        first_step: smallest step; lines without a step are left out.
        last_step: largest step.
    """

    search: str = ""
    run: str = ""
    show: str | None = None
    process: str = ""
    device: str = ""
    place: str = ""
    first_step: float | None = None
    last_step: float | None = None

    @property
    def has_steps(self) -> bool:
        """Whether it bounds the steps."""
        return self.first_step is not None or self.last_step is not None

    @property
    def steps(self) -> tuple[float, float]:
        """Smallest and largest step."""
        low = float("-inf") if self.first_step is None else self.first_step
        return low, float("inf") if self.last_step is None else self.last_step

    def allows_sender(self, process: str, device: str) -> bool:
        """Whether lines of a device of a process are wanted."""
        return (not self.process or process == self.process) and (not self.device or device == self.device)

    def allows_tap(self, described: TapDescriptor) -> bool:
        """Whether lines of a tap are wanted, by its kind, level and source line."""
        if self.place and not _has_place(printable(described.source_line), self.place):
            return False
        level = level_of(described)
        if self.show is None or self.show == level:
            return True
        is_log = level not in ("print", "progress", *FAILURES)
        if self.show == "log":
            return is_log
        if self.show in ("warning", "error"):
            least = logging.WARNING if self.show == "warning" else logging.ERROR
            return level in FAILURES or (is_log and _number(described) >= least)
        return False

    def allows_line(self, line: dict[str, Any]) -> bool:
        """Whether a line of an allowed sender and tap is wanted: by its step and its text."""
        low, high = self.steps
        if self.has_steps and (line["step"] is None or not low <= line["step"] <= high):
            return False
        search = self.search.casefold()
        return not search or search in line["text"].casefold() or search in line["tap"].casefold()


def _has_place(line: str, wanted: str) -> bool:
    # The line 31 is not the line 310.
    at = line.find(wanted)
    while at >= 0:
        if not (wanted[-1].isdigit() and line[at + len(wanted) :][:1].isdigit()):
            return True
        at = line.find(wanted, at + 1)
    return False


def level_of(described: TapDescriptor) -> str:
    """The level of a tap's lines: "print", "progress", "check", "nonfinite", or a log level such as "warning"."""
    if described.tap_kind.is_check:
        return "nonfinite" if described.kind == "nonfinite" else "check"
    if described.kind == "progress":
        return "progress"
    return "print" if "level" not in described.params else _name(_number(described))


def _number(described: TapDescriptor) -> int:
    found = described.params.get("level")
    return found if type(found) is int else logging.INFO


def _name(level: int) -> str:
    known = {number: name.lower() for name, number in logging.getLevelNamesMapping().items() if number}
    return known.get(level, f"level {level}"[:30])


BUDGET_SEC = 1.0
"""A search that takes longer returns what it has found, and where it may be continued."""

LINE_CHARS = 2000


class Cursor(NamedTuple):
    """The place of a line: Unix nanoseconds, number of the chunk, and number of the message in it."""

    time_ns: int
    chunk: int
    message: int

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Reverses `str`.

        Raises:
            ValueError: `text` is not a cursor.
        """
        parts = text.split(".")
        if len(parts) != 3 or not all(
            part.isascii() and part.isdecimal() and len(part) < 20 for part in parts
        ):
            raise ValueError(f"the cursor is {text[:50]!r}, expected one of an earlier answer")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Wanted(NamedTuple):
    """Which lines are wanted.

    Attributes:
        filter: what they have to be like.
        before: the lines before this one; None for the last ones.
        after: the lines after this one, in place of those before one.
        limit: number of lines.
    """

    filter: TextFilter = TextFilter()
    before: Cursor | None = None
    after: Cursor | None = None
    limit: int = 200


def lines(index: LogIndex, wanted: Wanted) -> dict[str, Any]:
    """Reads a page of lines, the oldest first, with `more` and the cursor `next` at which to continue."""
    forward = wanted.after is not None
    chunks, times = _chunks(index, wanted, forward)
    ends = time.monotonic() + BUDGET_SEC
    found: list[tuple[Cursor, dict[str, Any]]] = []
    resume: Cursor | None = None
    for number, reached in zip(chunks, times, strict=True):
        if len(found) >= wanted.limit:
            found.sort(key=lambda item: item[0], reverse=not forward)
            found = found[: wanted.limit]
            last = found[-1][0].time_ns
            if reached > last if forward else reached < last:
                break
        elif time.monotonic() > ends:
            resume = Cursor(max(0, reached - 1), 0, 0) if forward else Cursor(reached + 1, 0, 0)
            break
        found += _in_chunk(index, number, wanted, forward)
    found.sort(key=lambda item: item[0], reverse=not forward)
    more = len(found) > wanted.limit or resume is not None or len(found) == wanted.limit < index.texts
    found = found[: wanted.limit]
    if resume is not None:  # what lies beyond would come again
        found = [item for item in found if (item[0] < resume if forward else item[0] > resume)]
    elif more and found:
        resume = found[-1][0]
    shown = [line for _, line in sorted(found, key=lambda item: item[0])]
    return {
        "lines": shown,
        "more": more,
        "next": None if resume is None else str(resume),
        "total": index.texts,
    }


def _chunks(index: LogIndex, wanted: Wanted, forward: bool) -> tuple[list[int], list[int]]:
    # Chunks with texts in the order of reading, and the time up to which each one reaches.
    with index.lock:
        texts = index.chunks.column("texts")
        least, most = index.chunks.column("min_time"), index.chunks.column("max_time")
        chosen = texts > 0
        if wanted.filter.run:
            chosen &= index.of_run(wanted.filter.run)
        if wanted.filter.has_steps:
            within = np.zeros(len(chosen), np.bool_)
            within[index.chunks.within(*wanted.filter.steps, by_step=True)] = True
            chosen &= within
    if wanted.before is not None:
        chosen &= least <= wanted.before.time_ns
    if wanted.after is not None:
        chosen &= most >= wanted.after.time_ns
    numbers = np.flatnonzero(chosen)
    reached = (least if forward else most)[numbers]
    order = np.argsort(reached if forward else -reached, kind="stable")
    return numbers[order].tolist(), reached[order].tolist()


def _in_chunk(
    index: LogIndex, number: int, wanted: Wanted, forward: bool
) -> Iterator[tuple[Cursor, dict[str, Any]]]:
    with index.lock:
        origin = index.read_chunk(number)
    if origin is None or not wanted.filter.allows_sender(
        process_text(origin.run.writer), printable(origin.run.device)
    ):
        return
    # Of exported programs, only decoding tells the tap.
    places, _ = origin.places(lambda described: has_texts(described) and wanted.filter.allows_tap(described))
    times = origin.run.block.times_ns[places]
    order = np.argsort(times if forward else -times, kind="stable")
    decoder = MessageDecoder()
    count = 0
    for place in places[order].tolist():
        cursor = Cursor(int(origin.run.block.times[place]), number, place)
        if wanted.before is not None and not cursor < wanted.before:
            continue
        if wanted.after is not None and not cursor > wanted.after:
            continue
        for logged in decoder.messages(origin.run._replace(start=place, stop=place + 1)):
            line = None if isinstance(logged, Damage) else line_of(origin, logged, str(cursor), wanted.filter)
            if line is not None and wanted.filter.allows_line(line):
                count += 1
                yield cursor, line
        if count >= wanted.limit:
            return


def line_of(origin: Origin, logged: LoggedMessage, cursor: str, wanted: TextFilter) -> dict[str, Any] | None:
    """Describes a text for the page; None if the tap has no texts, or is not wanted."""
    described = logged.tap.described
    if described is None or not has_texts(described) or not wanted.allows_tap(described):
        return None
    message = logged.message
    try:
        text = (
            message_text(logged) if described.tap_kind is not METRICS else _metric_texts(described, message)
        )
        if text is None:
            text = short_text(logged.value, LINE_CHARS)
    except Exception as error:  # a message that does not fit its descriptor, which is foreign
        text = f"(cannot be shown: {error})"
    return {
        "cursor": cursor,
        "run": origin.run_name,
        "time": message.time_ns / 1e9,
        "process": process_text(logged.writer),
        "device": printable(str(message.device)),
        "step": logged.step,
        "tap": printable(described.name),
        "place": printable(described.source_line),
        "level": level_of(described),
        "text": printable(text)[:LINE_CHARS],
    }


def _metric_texts(described: TapDescriptor, message: Message) -> str:
    # The texts among the metrics of a message, with their names.
    layout = TapLayout(described)
    values = layout.take(message).values
    return "; ".join(
        f"{metric.name}: {described_template.fill(metric.template, [array[0, -1] for array in arrays], {})}"
        for metric, arrays in zip(layout.metrics, values, strict=True)
        if metric.form == TEXT
    )
