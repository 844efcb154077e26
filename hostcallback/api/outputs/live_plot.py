"""`live_plot`: plots values while the program runs, in place in a notebook."""

from __future__ import annotations

import difflib
import math
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from hostcallback.api.outputs.capture import OwnReceiver
from hostcallback.receiver import tap_arguments
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks import plotting
from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord
from hostcallback.receiver.sinks.plotting import Curve, NotebookDisplay, has_kernel
from hostcallback.receiver.sinks.scalars import TapScalars
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.source_line import public

MAX_CURVES = 50
"""Curves of a plot; further ones are left out, and a warning says so."""

MAX_OTHERS = 100
"""Names that did not match, kept for the warning about a name without values."""


class LivePlot(OwnReceiver):
    """Curves of named values. Made by `live_plot`. Any thread.

    A context manager, a sink (`outfeed_receiver(sinks=[plot])`, for all taps) and a writer of metrics
    (`outfeed_receiver(writers=[plot])`, for `hcb.metrics` only). Entering it again goes on with the curves.

    Example:
        with hcb.live_plot("loss") as plot:
            train()
        plot.save("loss.png")
    """

    takes_records: ClassVar[bool] = True
    name: ClassVar[str] = "live_plot"
    receiver_name: ClassVar[str] = "live_plot"
    hint_if_claimed: ClassVar[str] = (
        "Or plot through that receiver: outfeed_receiver(sinks=[hcb.live_plot(...)])"
    )

    def __init__(
        self, names: tuple[str, ...], log: tuple[str, ...], smooth: float, max_points: int, every_sec: float
    ) -> None:
        """Called by `live_plot`, which checks the options."""
        self._names, self._log = names, log
        self._smooth, self._max_points, self._every_sec = smooth, max_points, every_sec
        self._lock = threading.Lock()  # protects the curves, the taps and the names of others
        self._curves: dict[tuple[str, str], Curve] = {}
        self._taps: dict[int, tuple[Consumer, TapScalars | None]] = {}
        self._others: set[str] = set()
        self._left_out = False
        self._display: NotebookDisplay | None = None

    def __repr__(self) -> str:
        """The names and the number of values."""
        return f"<live_plot {', '.join(self._names)}: {sum(c.count for c in self._curves.values()):,} values>"

    @property
    def figure(self) -> Any:
        """A new `matplotlib.figure.Figure` of the values so far. Wait for others with `hcb.barrier_wait()`."""
        with self._lock:
            panels = [
                plotting.Panel(name, name in self._log, self._lines(number))
                for number, name in enumerate(self._names)
            ]
        return plotting.draw(panels, bool(self._smooth))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the values so far as a picture: `.png`, `.svg` or `.pdf`, by the end of the name.

        Raises:
            OSError: the file cannot be written.
            ValueError: matplotlib does not know the format.
        """
        self.figure.savefig(path, dpi=120)

    def _repr_png_(self) -> bytes:
        return plotting.png(self.figure)

    def open(self) -> None:
        """Shows the plot in the cell that runs, if this is a notebook; see `RecordWriter`."""
        if has_kernel() and self._display is None:
            self._display = NotebookDisplay(self._repr_png_, self._every_sec)

    def write(self, record: MetricRecord) -> None:
        """Takes the scalars of a step; see `RecordWriter`."""
        for name, value in record.scalars.items():
            self._add(name, "", record.step, value)

    def flush(self) -> None:
        """Nothing is buffered; see `RecordWriter`."""

    def close(self) -> None:
        """Shows the last state; see `RecordWriter`."""
        with self._lock:
            self._taps.clear()  # with their functions
        display, self._display = self._display, None
        if display is not None:
            display.close()
        self._warn_of_empty()

    def __call__(self, message: Message) -> None:
        """Takes a message; as `outfeed_receiver` calls it, on the receiver thread of its device."""
        consumer = message.consumer
        with self._lock:
            known = self._taps.get(id(consumer))
            if known is None or known[0] is not consumer:
                described = consumer.describe() if consumer.describe is not None else None
                is_read = (
                    described is not None and described.tap_kind is not tap_descriptor.METRICS
                )  # see `write`
                scalars = TapScalars(described) if described is not None and is_read else None
                known = self._taps[id(consumer)] = consumer, scalars
        tap = known[1]
        if tap is None:
            return
        step = tap.step(message)
        for name, value in tap.scalars(message, means=True).items():
            self._add(name, str(message.device), step, value)

    def _add(self, name: str, device: str, step: int | None, value: float) -> None:
        with self._lock:
            curve = self._curves.get((name, device)) or self._new_curve(name, device)
            if curve is None:
                return
            curve.add(curve.count if step is None else step, value)
        if self._display is not None:
            self._display.changed()

    def _new_curve(self, name: str, device: str) -> Curve | None:
        if self._panel_of(name) is None:
            if len(self._others) < MAX_OTHERS:
                self._others.add(name)
            return None
        if len(self._curves) < MAX_CURVES:
            curve = self._curves[name, device] = Curve(self._max_points, self._smooth)
            return curve
        if not self._left_out:
            self._left_out = True
            logger.warning("hcb.live_plot has %d curves; %r and others are left out", MAX_CURVES, name)
        return None

    def _panel_of(self, name: str) -> int | None:
        # An exact name comes before a glob.
        if name in self._names:
            return self._names.index(name)
        return next((n for n, glob in enumerate(self._names) if tap_arguments.matches(name, glob)), None)

    def _lines(self, panel: int) -> list[plotting.Line]:
        found = sorted(key for key in self._curves if self._panel_of(key[0]) == panel)
        lines = []
        for name, device in found:
            curve = self._curves[name, device]
            several = sum(other == name for other, _ in found) > 1
            label = f"{name} {device}".strip() if several else name
            label += f" ({curve.nonfinite:,} not finite)" if curve.nonfinite else ""
            lines.append(plotting.Line(label, curve.points(), curve.stride > 1))
        return lines

    def _warn_of_empty(self) -> None:
        with self._lock:
            plotted = {self._panel_of(name) for name, _ in self._curves}
            others = sorted(self._others)
        for number, name in enumerate(self._names):
            if number not in plotted:
                near = difflib.get_close_matches(name, others, n=3) or others[:3]
                there = f"; there were {', '.join(map(repr, near))}" if near else ""
                logger.warning("hcb.live_plot got no value of the name %r%s", name, there)


@public
def live_plot(
    *names: str,
    log: bool | str | Sequence[str] = False,
    smooth: float = 0.0,
    max_points: int = 2000,
    every_sec: float = 0.5,
) -> LivePlot:
    """Returns a context manager that plots values by step while the program runs: those of `hcb.metrics` and of taps.

    In a notebook the plot is in the cell that enters the block, and is replaced there, by a separate thread, which
    takes at most a tenth of a core. Without a notebook nothing is drawn until `plot.save(path)` or `plot.figure` asks
    for it. Receiver threads only add numbers to the curves. If a receiver is open around the block, give it
    `sinks=[plot]` instead of the `with` statement.

    A tap's values have its name, and in a pytree the keys after slashes, as in `grads/w`. An array, such as that of
    vmap lanes, is plotted as its mean. The step is the integer called `step` in the tapped value, else the number of
    the message; each device has a curve. Metrics are plotted as writers get them: one value per step.

    Args:
        *names: names or globs (`grads/*`) of values. Each has separate axes, which all values that match share. All
            values by default.
        log: whether the values have a logarithmic axis, or the names among `names` whose axes are so.
        smooth: weight of the past in an exponential moving average, from 0 (none) to below 1; the values are drawn
            faintly behind it.
        max_points: bound of the points of a curve. Beyond it, points cover several values: a line at their mean, in a
            band from the smallest to the largest.
        every_sec: smallest time between two drawings, in seconds.

    Raises:
        HostCallbackError: the package matplotlib is missing.
        TypeError: a name is not a text.
        ValueError: a number is out of range, or `log` has a name that `names` does not have.
        DeviceClaimedError: (on entering) another receiver is open.
        TapFunctionException: (on leaving) has the exceptions of tap functions.

    Example:
        with hcb.live_plot("loss", "acc", log="loss") as plot:
            train()
        plot.save("training.png")
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"live_plot takes names of values, got {name!r:.80}: hcb.live_plot('loss', 'acc')"
            )
    chosen = tuple(dict.fromkeys(names)) or ("*",)
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth is {smooth!r}, expected a number from 0 to below 1, such as 0.9")
    if type(max_points) is not int or max_points < 2:
        raise ValueError(f"max_points is {max_points!r}, expected a whole number of at least 2")
    if not 0 <= every_sec < math.inf:
        raise ValueError(f"every_sec is {every_sec!r}, expected a finite number of seconds, 0 or more")
    plotting.matplotlib_figure()
    return LivePlot(chosen, _log_names(log, chosen), smooth, max_points + max_points % 2, every_sec)


def _log_names(log: bool | str | Sequence[str], names: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(log, bool):
        return names if log else ()
    wanted = (log,) if isinstance(log, str) else tuple(log)
    for name in wanted:
        if name not in names:
            raise ValueError(f"log has {name!r}, expected True, False, or names among {', '.join(names)}")
    return wanted
