"""Converts to TensorBoard's event files: numbers as scalars, arrays as histograms, texts as texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.messages import NAME
from hostcallback.receiver.taplog.convert.output import ConvertError, plain_array
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.render.json import process_text
from hostcallback.receiver.taplog.render.text import LoggedLeaves, joined, message_text
from hostcallback.receiver.wire.frame_layout import Array

SUFFIX = ".hcb"
"""Suffix of the event files' names."""

_BOUNDS = 1e-12 * 1.1 ** np.arange(774)
BINS = [*-_BOUNDS[::-1], 0.0, *_BOUNDS]
"""Bounds of the bins of histograms: those of TensorBoard, up to 1e20."""


def _tensorboard() -> Any:
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
        import tensorboardX.summary
    except ImportError as error:
        raise ConvertError(
            "TensorBoard's event files need the package tensorboardX: pip install 'hostcallback[tensorboard]'"
        ) from error
    return tensorboardX


class TensorBoardConversion:
    """Writes event files. Messages of several devices go to one folder per device, which is a run of TensorBoard.

    Attributes:
        left_out: number of arrays that event files cannot hold, by reason.
    """

    def __init__(self, folder: Path, *, several: bool) -> None:
        """Prepares the conversion.

        Args:
            folder: an existing folder for the event files.
            several: whether the messages are of several devices.

        Raises:
            ConvertError: tensorboardX is missing.
        """
        self._library = _tensorboard()
        self._folder = folder
        self._several = several
        self._writers: dict[str, Any] = {}
        self._leaves = LoggedLeaves()
        self._without_step: Counter[tuple[str, str]] = Counter()
        self.left_out: Counter[str] = Counter()

    def message(self, logged: LoggedMessage) -> None:
        """Writes the values of a message. Messages without a step are numbered per tap instead."""
        message, described = logged.message, logged.tap.described
        name = message.consumer.name
        run = f"{process_text(logged.writer)} {message.device}".replace("/", "_").replace(":", "_")
        step = logged.step
        if step is None:
            step = self._without_step[run, name]
            self._without_step[run, name] += 1
        writer = self._writer(run if self._several else "")
        event = self._library.proto.event_pb2.Event(step=step, wall_time=message.time_ns * 1e-9)
        text = self._text(logged)
        if text is not None:
            event.summary.value.extend(self._library.summary.text(name, text).value)
        if described is None or described.tap_kind.has_metrics:
            for leaf in self._leaves.of(logged):
                if leaf.name != NAME and not leaf.name.endswith(f"/{NAME}"):
                    self._add(event.summary, joined(name, leaf.name), plain_array(leaf.array))
        if event.summary.value:
            writer.write_event(event)

    def lost(self, run: LostRun) -> None:
        """Does nothing: events are values only."""

    def finish(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()

    def _add(self, summary: Any, tag: str, array: Array) -> None:
        if array.dtype.kind == "c":
            self.left_out["complex numbers"] += 1
        elif not array.ndim:
            summary.value.extend(self._library.summary.scalar(tag, float(array)).value)
        else:
            finite = array.astype(np.float64).reshape(-1)
            finite = finite[np.isfinite(finite)]
            if finite.size:
                summary.value.extend(self._library.summary.histogram(tag, finite, BINS).value)
            else:
                self.left_out["arrays without a finite element"] += 1

    def _text(self, logged: LoggedMessage) -> str | None:
        try:
            return message_text(logged)
        except Exception:  # one message that cannot be shown must not end the conversion
            self.left_out["texts that cannot be formatted"] += 1
            return None

    def _writer(self, run: str) -> Any:
        writer = self._writers.get(run)
        if writer is None:
            # Not a SummaryWriter, which has a queue and a thread: without the thread it never returns.
            (self._folder / run).mkdir(parents=True, exist_ok=True)
            prefix = str(self._folder / run / "events")
            writer = self._library.event_file_writer.EventsWriter(prefix, SUFFIX)
            self._writers[run] = writer
        return writer
