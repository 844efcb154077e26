"""Converts to TensorBoard's event files: numbers as scalars, arrays as histograms, texts as texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.columns.tables import optional
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, LoggedTap
from hostcallback.receiver.taplog.render import joined, message_text, plain_array, process_text

SUFFIX = ".hcb"
"""Suffix of the event files' names."""

_BOUNDS = 1e-12 * 1.1 ** np.arange(774)
BINS = [*-_BOUNDS[::-1], 0.0, *_BOUNDS]
"""Bounds of the bins of histograms: those of TensorBoard, up to 1e20."""


def write_tensorboard(
    messages: Iterable[LoggedMessage], folder: Path, name_of: Callable[[LoggedTap], str], *, several: bool
) -> Counter[str]:
    """Writes event files. Messages without a step are numbered per tap instead.

    Args:
        messages: of a log, one by one: columns do not have the texts of prints and checks.
        folder: an existing folder for the files.
        name_of: returns what a tap is called in them.
        several: whether the messages are of several devices. Then each device has a folder, which is a run of
            TensorBoard.

    Returns:
        The number of values that event files cannot hold, by reason.

    Raises:
        HostCallbackError: tensorboardX is missing.
    """
    writing, events, summary = (
        optional(f"tensorboardX.{name}", "tensorboard")
        for name in ("event_file_writer", "proto.event_pb2", "summary")
    )
    writers: dict[str, Any] = {}
    without_step: Counter[tuple[str, str]] = Counter()
    left_out: Counter[str] = Counter()
    for logged in messages:
        message, step = logged.message, logged.step
        run = f"{process_text(logged.writer)} {message.device}".replace("/", "_").replace(":", "_")
        if step is None:
            tap = name_of(logged.tap)
            step = without_step[run, tap]
            without_step[run, tap] += 1
        run = run if several else ""
        if run not in writers:
            # Not a SummaryWriter, which has a queue and a thread: without the thread it never returns.
            (folder / run).mkdir(parents=True, exist_ok=True)
            writers[run] = writing.EventsWriter(str(folder / run / "events"), SUFFIX)
        event = events.Event(step=step, wall_time=message.time_ns * 1e-9)
        for found in _summaries(summary, logged, name_of(logged.tap), left_out):
            event.summary.value.extend(found.value)
        if event.summary.value:
            writers[run].write_event(event)
    for writer in writers.values():
        writer.close()
    return left_out


def _summaries(summary: Any, logged: LoggedMessage, name: str, left_out: Counter[str]) -> Iterator[Any]:
    described = logged.tap.described
    try:
        text = message_text(logged)
    except Exception:  # one message that cannot be shown must not end the conversion
        left_out["texts that cannot be formatted"] += 1
    else:
        if text is not None:
            yield summary.text(name, text)
    for leaf in logged.leaves_but_step if described is None or described.tap_kind.has_metrics else ():
        array, tag = plain_array(leaf.array), joined(name, leaf.name)
        if array.dtype.kind == "c":
            left_out["complex numbers"] += 1
        elif not array.ndim:
            yield summary.scalar(tag, float(array))
        elif (finite := array[np.isfinite(array)]).size:
            yield summary.histogram(tag, finite.astype(np.float64), BINS)
        else:
            left_out["arrays without a finite element"] += 1
