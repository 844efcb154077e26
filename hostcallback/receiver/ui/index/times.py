"""Answers about the times of places: their shares over the calls, their distributions, and the slowest calls."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.sinks import times as measured
from hostcallback.receiver.sinks.time_rows import (
    BINS_PER_OCTAVE,
    FEW_CALLS,
    ITERATION,
    PROGRAM,
    TimeRow,
    bin_numbers,
    percentile,
    slow_places,
)
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.text import printable
from hostcallback.receiver.ui.index import buckets
from hostcallback.receiver.ui.index.arrays import messages
from hostcallback.receiver.ui.index.buckets import COUNT, LAST_TIME, MAX, STEP, SUM, TIME
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.index.series import DETAIL_CHUNKS, Detail
from hostcallback.receiver.ui.index.taps import Tap
from hostcallback.receiver.wire.array_types import Array

COLUMNS = 240
BINS = 48
SLOWEST = 10

Call = dict[str, tuple[list[str], dict[str, Array]]]
"""What a message has of each place: the axes of its times, and these."""


def times(index: LogIndex, number: int) -> dict[str, Any]:
    """Describes what a tap measured, as docs/design/ui.md says; `number` is the id of its first place.

    Without such a tap it is the last one. Without any, `taps` is empty, and there is nothing else.
    """
    groups: dict[tuple[str, str, str], list[Tap]] = {}
    texts: dict[tuple[str, str, str], Tap] = {}
    with index.lock:
        for tap in index.taps.rows:
            key = tap.run, tap.name, tap.place
            if tap.kind == "time" and tap.count:
                groups.setdefault(key, []).append(tap)
            elif tap.kind == "text":
                texts[key] = tap
    found = {"taps": [[taps[0].number, run, printable(name)] for (run, name, _), taps in groups.items()]}
    if not groups:
        return found
    key = next((key for key, taps in groups.items() if taps[0].number == number), [*groups][-1])
    taps, distributions = groups[key], index.distributions[key]
    launches = _launches(index, texts[key]) if key in texts else []
    is_short = key in texts and sum(texts[key].counts) <= FEW_CALLS
    inner = {PROGRAM}.union(*(_inner(call) for launch in launches for call in launch))
    bins = distributions.bins()
    shown = (is_short and _by_iteration(launches, inner)) or _by_call(index, taps, inner, bins)
    return {**found, "tap": taps[0].number, **shown, **_distributions(distributions.rows(), bins)}


def _launches(index: LogIndex, text: Tap) -> list[list[Call]]:
    # The messages of a tap that has few, else its last one: of each launch, one for each of its devices.
    count = sum(text.counts)
    numbers = list(range(count) if count <= FEW_CALLS else [count - 1])
    found: dict[Any, list[Call]] = {}
    for logged in messages(index, text, numbers):
        with contextlib.suppress(LookupError, ValueError):  # of a foreign log
            if logged.tap.described is None:
                continue
            sink = measured.TimeSink.of(logged.tap.described)
            call = {place: (axes, given) for place, axes, given in sink.places(logged.message)}
            # The callback transport tells of no launch: there a message is one.
            launch = logged.writer, logged.message.run_id or -len(found) - 1
            found.setdefault(launch, []).append(call)
    return [*found.values()]


def _inner(call: Call) -> set[str]:
    """The places that are in other ones. The times of all others do not overlap, and may be added."""
    spans = {}
    for place, (axes, given) in call.items():
        first = tuple(0 if axis == measured.DEVICE else slice(None) for axis in axes)
        starts = np.ascontiguousarray(given[measured.START][first]).view(np.uint64).ravel().astype(np.int64)
        lengths = given[measured.SECONDS][first].ravel() * 1e9
        ran = ~np.isnan(lengths)
        order = np.argsort(starts[ran], kind="stable")
        spans[place] = starts[ran][order], lengths[ran][order]

    def is_in(inner: str, outer: str) -> bool:
        (starts, lengths), (begins, extents) = spans[inner], spans[outer]
        if inner == outer or not len(starts) or not len(begins) or lengths.sum() >= extents.sum():
            return False
        middles = starts + lengths / 2
        at = np.searchsorted(begins, middles, side="right") - 1
        return bool((at >= 0).all() and (middles <= begins[at] + extents[at]).all())

    places = [place for place in call if place != PROGRAM]
    return {place for place in places if any(is_in(place, other) for other in places)}


def _by_iteration(launches: Sequence[Sequence[Call]], inner: set[str]) -> dict[str, Any]:
    # The iterations of the longest loop in few launches; empty if there are more launches than iterations.
    found: dict[str, list[Array]] = {}
    for launch in launches:
        of_devices: dict[str, list[Array]] = {}
        for call in launch:
            for place in call:
                if place != PROGRAM:
                    of_devices.setdefault(place, []).append(_of_iterations(*call[place]))
        outer = (devices for place, devices in of_devices.items() if place not in inner)
        length = max((len(each) for devices in outer for each in devices), default=0)
        for place, devices in of_devices.items():
            if all(len(each) == length for each in devices):
                found.setdefault(place, []).append(np.mean(devices, axis=0))
    columns = {place: np.concatenate(parts) for place, parts in found.items()}
    length = max((len(each) for place, each in columns.items() if place not in inner), default=0)
    if length <= len(launches):
        return {}
    ordered = sorted(columns, key=inner.__contains__)
    columns = {place: columns[place] for place in ordered if len(columns[place]) == length}
    stacked = [place for place in columns if place not in inner]
    table = np.stack([*columns.values()])
    whole, cells = table[: len(stacked)].sum(axis=0), _cells(length)
    slowest = [
        {"x": at, "step": None, "time": None, "seconds": float(whole[at]), "parts": table[:, at].tolist()}
        for at in np.argsort(-whole, kind="stable")[:SLOWEST].tolist()
    ]
    inside = [*columns][len(stacked) :]
    seconds = [whole, *table]
    medians = [_median(Counter(bin_numbers(row[row > 0])), length) for row in seconds]
    return _answer("iteration", stacked, inside, cells, np.arange(length), seconds, medians, slowest)


def _of_iterations(axes: Sequence[str], given: dict[str, Array]) -> Array:
    # The seconds of each iteration of the outermost loop; of several devices the mean. Empty without a loop.
    if ITERATION not in axes:
        return np.empty(0)
    seconds = np.nan_to_num(given[measured.SECONDS].astype(np.float64))
    devices = math.prod(
        size for axis, size in zip(axes, seconds.shape, strict=False) if axis == measured.DEVICE
    )
    loops = np.moveaxis(seconds, axes.index(ITERATION), 0)
    found: Array = loops.reshape(len(loops), -1).sum(axis=1) / devices
    return found


def _median(bins: Counter[int], count: int) -> float:
    # As `hcb stats` has it: 0 where a place runs in at most half of the calls or iterations.
    return percentile(bins, 50) if 2 * bins.total() > count else 0.0


def _by_call(
    index: LogIndex, taps: Sequence[Tap], inner: set[str], bins: dict[str, Counter[int]]
) -> dict[str, Any]:
    # The columns have as many calls each; what a while loop sent belongs to the call that ended next.
    with index.lock:
        rows = {tap.leaf: tap.buckets.rows.copy() for tap in taps}
        by_place = {tap.leaf: tap for tap in taps}
        has_steps = all(tap.buckets.has_steps and tap.without_step < tap.count for tap in taps)
    counting = by_place.get(PROGRAM) or max(taps, key=lambda tap: tap.count)
    calls = rows[counting.leaf]
    calls = calls[np.argsort(calls[:, TIME], kind="stable")]
    stacked = [place for place in rows if place not in inner]
    inside = [place for place in rows if place in inner and place != PROGRAM]
    seconds = []
    for each in (calls, *(rows[place] for place in stacked + inside)):
        of_call = np.minimum(np.searchsorted(calls[:, TIME], each[:, TIME]), len(calls) - 1)
        seconds.append(np.bincount(of_call, each[:, SUM], len(calls)) / np.maximum(calls[:, COUNT], 1))
    medians, count = [], bins[counting.leaf].total()
    for place, row in zip((counting.leaf, *stacked, *inside), seconds, strict=True):
        # Buckets may have several calls, and the times of a place that runs several times in one are added.
        is_single = bins[place].total() <= count
        of_calls = bins[place] if is_single else Counter(bin_numbers(row[row > 0]))
        medians.append(_median(of_calls, count if is_single else len(calls)))
    slowest = _slowest(index, counting, [by_place[place] for place in stacked + inside], calls)
    x = calls[:, STEP] if has_steps else np.arange(len(calls))
    if has_steps:  # of a few calls the step may not be known; devices of one call may have a message each
        known = x != float(NO_STEP)
        x, at, counts = np.unique(x[known], return_inverse=True, return_counts=True)
        seconds = [np.bincount(at, each[known]) / counts for each in seconds]
    return _answer(
        "step" if has_steps else "call", stacked, inside, _cells(len(x)), x, seconds, medians, slowest
    )


def _slowest(index: LogIndex, counting: Tap, places: Sequence[Tap], calls: Array) -> list[dict[str, Any]]:
    # The slowest calls, from the log: buckets may have several. They are in those with the largest values.
    top = calls[np.argsort(-calls[:, MAX], kind="stable")[:SLOWEST]]
    with index.lock:
        chunks = [index.chunks.within(row[TIME], row[LAST_TIME], by_step=False) for row in top]
    detail = Detail(counting, *places)
    for number in index.with_tap(counting, np.unique(np.concatenate(chunks)))[:DETAIL_CHUNKS].tolist():
        index.read_again(number, detail)
    found = {
        number: np.concatenate([np.empty((0, buckets.COLUMNS)), *rows])
        for number, rows in detail.rows.items()
    }
    single = found[counting.number]
    shown = []
    for call in single[np.argsort(-single[:, MAX], kind="stable")[:SLOWEST]]:
        parts = [each[each[:, TIME] == call[TIME]] for each in (found[tap.number] for tap in places)]
        shown.append(
            {
                "x": None,
                "step": None if call[STEP] == float(NO_STEP) else int(call[STEP]),
                "time": float(call[TIME]),
                "seconds": float(call[SUM] / max(call[COUNT], 1)),
                "parts": [float(part[:, SUM].sum() / max(call[COUNT], 1)) for part in parts],
            }
        )
    return shown


def _cells(count: int) -> Array:
    # The column of each call or iteration.
    return np.arange(count) // max(1, math.ceil(count / COLUMNS))


def _answer(
    axis: str,
    stacked: Sequence[str],
    inside: Sequence[str],
    cells: Array,
    x: Array,
    seconds: Sequence[Array],
    medians: Sequence[float],
    slowest: list[dict[str, Any]],
) -> dict[str, Any]:
    """The shares of the stacked places: `seconds` and `medians` have the whole, each of them, and those inside."""
    sizes = np.bincount(cells)
    shown = seconds[: 1 + len(stacked)]
    whole, *parts = ([round(each, 9) for each in (np.bincount(cells, row) / sizes).tolist()] for row in shown)
    names = [printable(place) for place in (*stacked, *inside)]
    usual, of_places = medians[0], dict(zip(names, medians[1:], strict=True))
    for call in slowest:
        call["longer"] = slow_places(dict(zip(names, call.pop("parts"), strict=True)), of_places, usual)
    return {
        "axis": axis,
        "x": (np.bincount(cells, x) / sizes).tolist(),
        "stacked": names[: len(stacked)],
        "usual": usual,
        "whole": whole,
        "seconds": parts,
        "slowest": slowest,
    }


def _distributions(rows: Sequence[TimeRow], bins: dict[str, Counter[int]]) -> dict[str, Any]:
    # A table of places, and how often each took how long: counts of ranges with equal ratios.
    numbers = np.array([number for each in bins.values() for number in each] or [0])
    low, width = int(numbers.min()), max(1, math.ceil((np.ptp(numbers) + 1) / BINS))
    places = []
    for row in rows:
        counts = [0] * BINS
        for number, count in bins[row.place].items():
            counts[(number - low) // width] += count
        figures = {name: getattr(row, name) for name in ("mean", "p50", "p90", "p99", "share", "spread")}
        places.append(
            {"place": printable(row.place), "count": row.count, "slowest": row.slowest, "counts": counts}
            | {name: None if math.isnan(each) else each for name, each in figures.items()}
        )
    ends = [2 ** (end / BINS_PER_OCTAVE) for end in (low, low + BINS * width)]
    return {"places": places, "range": ends}
