"""Reads arrays from the log, on demand: single messages with statistics, and histograms over time."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, MessageDecoder
from hostcallback.receiver.taplog.render import plain_value
from hostcallback.receiver.ui.index.buckets import real_values
from hostcallback.receiver.ui.index.log_index import LogIndex, Origin
from hostcallback.receiver.ui.index.series import DETAIL_CHUNKS
from hostcallback.receiver.ui.index.taps import Tap
from hostcallback.receiver.wire.array_types import Array

BINS = 40
MAX_VALUES = 4096
"""Elements of an array that the page gets one by one."""

MAX_PIXELS = 1 << 20

Found = tuple[LoggedMessage, Array]


def array(index: LogIndex, tap: Tap, at: int, strip: int = 0) -> dict[str, Any]:
    """Describes message number `at` of a tap, -1 is the last one; with a strip of pictures over all messages."""
    with index.lock:
        count = sum(tap.counts)
    place = max(0, min(count - 1, at if at >= 0 else count + at))
    found = list(_messages(index, tap, [place])) if count else []
    if not found:
        return {
            "step": None, "dtype": "", "shape": [], "stats": None, "values": None, "image": None, "count": count,
        }  # fmt: skip
    logged, value = found[0]
    return {
        "at": place,
        "step": logged.step,
        "time": logged.message.time_ns / 1e9,
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "stats": _stats(value),
        "values": plain_value(value) if value.size <= MAX_VALUES else None,
        "image": _image(value) if tap.kind == "image" else None,
        "count": count,
        "strip": [
            [number, each.step, _image(pixels)]
            for number, (each, pixels) in _evenly(index, tap, np.arange(count), strip)
        ]
        if strip and tap.kind == "image"
        else [],
    }


def heatmap(
    index: LogIndex, taps: Sequence[Tap], columns: int, low: float | None, high: float | None
) -> dict[str, Any]:
    """Histograms of at most `columns` messages of each tap, evenly chosen between two steps (or numbers of messages).

    Returns:
        `edges` of the bins, and for each tap its `x` and `counts`, a list per x.
    """
    of_taps = [_columns(index, tap, columns, low, high) for tap in taps]
    edges = _edges([values for rows in of_taps for _, values in rows])
    return {
        "edges": edges.tolist(),
        "taps": [
            {
                "tap": tap.number,
                "x": [x for x, _ in rows],
                "counts": [
                    np.histogram(values[np.isfinite(values)], edges)[0].tolist() for _, values in rows
                ],
            }
            for tap, rows in zip(taps, of_taps, strict=True)
        ],
    }


def _evenly(index: LogIndex, tap: Tap, numbers: Array, most: int) -> Iterator[tuple[int, Found]]:
    # At most that many of these messages, evenly chosen, with their numbers.
    places = np.unique(np.linspace(0, max(0, len(numbers) - 1), most).astype(np.int64))[: len(numbers)]
    chosen = numbers[places].tolist()
    return zip(chosen, _messages(index, tap, chosen), strict=False)


def _columns(
    index: LogIndex, tap: Tap, columns: int, low: float | None, high: float | None
) -> list[tuple[float, Array]]:
    # The step and the values of the messages of a heat map.
    rows: list[tuple[float, Array]] = []
    for number, (logged, value) in _evenly(index, tap, _numbers(index, tap, low, high), columns):
        x = float(number if logged.step is None else logged.step)
        if (low is None or x >= low) and (high is None or x <= high) and value.dtype.kind in "biufcV":
            rows.append((x, real_values(value.reshape(-1))))
    return sorted(rows, key=lambda row: row[0])


def _edges(values: list[Array]) -> Array:
    finite = [found[np.isfinite(found)] for found in values]
    finite = [found for found in finite if found.size]
    low = min((float(found.min()) for found in finite), default=0.0)
    high = max((float(found.max()) for found in finite), default=1.0)
    if not np.isfinite(high - low) or high <= low:
        low, high = (low - 0.5, low + 0.5) if abs(low) < 1e15 else (-abs(low) * 2, abs(low) * 2)
    return np.linspace(low, high, BINS + 1)


def _located(index: LogIndex, tap: Tap) -> tuple[Array, Array]:
    # The chunks with messages of the tap, by time, and after each one the number of messages so far.
    with index.lock:
        chunks, counts = np.array(tap.chunks, np.int64), np.array(tap.counts, np.int64)
        order = np.argsort(index.chunks.column("min_time")[chunks], kind="stable")
    return chunks[order], np.cumsum(counts[order])


def _numbers(index: LogIndex, tap: Tap, low: float | None, high: float | None) -> Array:
    # Numbers of the messages between two steps. If they are in many chunks, of those in all these chunks.
    chunks, ends = _located(index, tap)
    total = int(ends[-1]) if len(ends) else 0
    if (low is None and high is None) or not total:
        return np.arange(total)
    bounds = -np.inf if low is None else low, np.inf if high is None else high
    with index.lock:
        within = set(index.chunks.within(*bounds, by_step=True).tolist())
    places = [place for place, chunk in enumerate(chunks.tolist()) if chunk in within]
    found: list[Array] = [np.empty(0, np.int64)]
    for place in places:
        first = int(ends[place - 1]) if place else 0
        numbers = np.arange(first, int(ends[place]))
        if len(places) <= DETAIL_CHUNKS:
            numbers = numbers[_is_between(index, tap, int(chunks[place]), bounds, len(numbers))]
        found.append(numbers)
    return np.concatenate(found)


def _is_between(index: LogIndex, tap: Tap, chunk: int, bounds: tuple[float, float], count: int) -> Array:
    # For each message of the tap in a chunk, whether its step is between the bounds.
    with index.lock:
        origin = index.read_chunk(chunk)
    steps = (
        np.empty(0, np.int64) if origin is None else origin.run.steps[origin.places(partial(_is_of, tap))[0]]
    )
    if len(steps) != count:  # only decoding can tell which messages are of the tap
        return np.ones(count, np.bool_)
    found: Array = (steps >= bounds[0]) & (steps <= bounds[1])
    return found


def _messages(index: LogIndex, tap: Tap, numbers: list[int]) -> Iterator[Found]:
    # The messages with these numbers, and the tap's leaf of each.
    for logged in messages(index, tap, numbers):
        names = logged.tap.leaf_names(len(logged.message.arrays))
        if tap.leaf in names:
            yield logged, np.asarray(logged.message.arrays[names.index(tap.leaf)])


def messages(index: LogIndex, tap: Tap, numbers: list[int]) -> Iterator[LoggedMessage]:
    """The messages of what is no scalar with these numbers, ascending: by the chunks' times, in the order of each."""
    chunks, ends = _located(index, tap)
    wanted: dict[int, list[int]] = {}
    for number in numbers:
        at = int(np.searchsorted(ends, number, side="right"))
        if at < len(chunks):
            first = int(ends[at - 1]) if at else 0
            wanted.setdefault(int(chunks[at]), []).append(number - first)
    decoder = MessageDecoder()
    for chunk, places in wanted.items():
        with index.lock:
            origin = index.read_chunk(chunk)
        if origin is not None:
            yield from _in_chunk(origin, tap, set(places), decoder)


def _in_chunk(origin: Origin, tap: Tap, places: set[int], decoder: MessageDecoder) -> Iterator[LoggedMessage]:
    run = origin.run
    candidates, decodes_all = origin.places(partial(_is_of, tap))
    number = -1
    for place in candidates.tolist():
        number += 1
        if not decodes_all and number not in places:
            continue
        for logged in decoder.messages(run._replace(start=place, stop=place + 1)):
            if isinstance(logged, Damage) or logged.tap.described is None:
                continue
            if decodes_all and not _is_of(tap, logged.tap.described):
                number -= 1
                continue
            if number in places:
                yield logged


def _is_of(tap: Tap, described: Any) -> bool:
    return bool(described.name == tap.name and described.source_line == tap.place)


def _stats(value: Array) -> dict[str, Any] | None:
    if value.dtype.kind not in "biufcV" or not value.size:
        return None
    measured = real_values(value)
    finite = measured[np.isfinite(measured)]
    known = {"zeros": int((finite == 0).sum()), "nonfinite": int(measured.size - finite.size)}
    if not finite.size:
        return {"mean": None, "std": None, "min": None, "max": None, **known}
    with np.errstate(over="ignore"):
        found = {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
    return {name: float(each) if np.isfinite(each) else None for name, each in found.items()} | known


def _image(value: Array) -> str | None:
    # A PNG as a data URL.
    if value.ndim == 2:
        value = value[:, :, np.newaxis]
    if value.ndim != 3 or value.shape[2] not in (1, 3, 4) or not 0 < value[:, :, 0].size <= MAX_PIXELS:
        return None
    pixels = value if value.dtype.kind in "iu" else np.nan_to_num(real_values(value)) * 255
    data = np.clip(pixels, 0, 255).astype(np.uint8)
    height, width, channels = data.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), data.reshape(height, -1)], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
