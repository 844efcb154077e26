"""Reads printed texts and failed checks from the log, on demand: pages of lines, and searches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, RunDecoder
from hostcallback.receiver.taplog.render.json import process_text, short_text
from hostcallback.receiver.taplog.render.text import message_text
from hostcallback.receiver.terminal import printable
from hostcallback.receiver.ui.index.log_index import LogIndex, Origin
from hostcallback.receiver.ui.texts.text_filter import TextFilter, level_of
from hostcallback.receiver.wire.dtypes import Array

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
    places = _text_places(origin, wanted.filter)
    times = origin.run.block.times_ns[places]
    order = np.argsort(times if forward else -times, kind="stable")
    decoder = RunDecoder()
    count = 0
    for place in places[order].tolist():
        cursor = Cursor(int(origin.run.block.times[place]), number, place)
        if wanted.before is not None and not cursor < wanted.before:
            continue
        if wanted.after is not None and not cursor > wanted.after:
            continue
        for logged in decoder.messages(origin.run._replace(start=place, stop=place + 1)):
            line = None
            if not isinstance(logged, Damage) and _is_of_wanted_tap(logged, wanted.filter):
                line = line_of(origin.run_name, logged, str(cursor))
            if line is not None and wanted.filter.allows_line(line):
                count += 1
                yield cursor, line
        if count >= wanted.limit:
            return


def _text_places(origin: Origin, wanted: TextFilter) -> Array:
    # Messages of taps with texts, and those that only decoding can tell.
    run = origin.run
    ids = [
        consumer_id
        for consumer_id in run.block.consumers
        if consumer_id in (WHOLE_ID, SHARDS_ID)
        or (
            (described := run.described.get(consumer_id)) is not None
            and (described.tap_kind.is_text or described.tap_kind.prints)
            and wanted.allows_tap(described)
        )
    ]
    return np.flatnonzero(np.isin(run.block.consumer_ids, np.array(ids, np.uint64)))


def _is_of_wanted_tap(logged: LoggedMessage, wanted: TextFilter) -> bool:
    # Of exported programs, only decoding tells the tap.
    return logged.tap.described is not None and wanted.allows_tap(logged.tap.described)


def line_of(run_name: str, logged: LoggedMessage, cursor: str) -> dict[str, Any] | None:
    """Describes a text for the page; None if the tap has no texts."""
    described = logged.tap.described
    if described is None or not (described.tap_kind.is_text or described.tap_kind.prints):
        return None
    message = logged.message
    try:
        text = message_text(logged)
        if text is None:
            text = short_text(logged.value, LINE_CHARS)
    except Exception as error:  # a message that does not fit its descriptor, which is foreign
        text = f"(cannot be shown: {error})"
    return {
        "cursor": cursor,
        "run": run_name,
        "time": message.time_ns / 1e9,
        "process": process_text(logged.writer),
        "device": printable(str(message.device)),
        "step": logged.step,
        "tap": printable(described.name),
        "place": printable(described.source_line),
        "level": level_of(described),
        "text": printable(text)[:LINE_CHARS],
    }
