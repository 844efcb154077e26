"""Plots while a program runs: bounded curves, their drawing with matplotlib, and the display in a notebook."""

from __future__ import annotations

import importlib
import io
import math
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.log import logger
from hostcallback.receiver.wire.array_types import Array


class Points(NamedTuple):
    """The points of a curve, arrays of float64 and of one length.

    Attributes:
        steps: the first step of each point.
        means: mean of the point's values; NaN if one of them is not finite.
        lows: smallest finite value; NaN if there is none.
        highs: largest finite value; NaN if there is none.
        smooth: exponential moving average of all values up to the point's last.
    """

    steps: Array
    means: Array
    lows: Array
    highs: Array
    smooth: Array


class Curve:
    """Values by step, in at most `max_points` points. Not thread-safe.

    A point covers `stride` consecutive values. When there are too many points, each two become one, and the stride
    doubles. The smallest and the largest value of a point are kept, so that no spike is lost.

    Attributes:
        count: number of values.
        nonfinite: number of values that are NaN or infinite.
        stride: number of values that a point covers.
    """

    def __init__(self, max_points: int, smooth: float) -> None:
        """`smooth` is the weight of the past in the moving average, 0 for none."""
        self.count = self.nonfinite = 0
        self.stride = 1
        self._weight = smooth
        self._average, self._total = 0.0, 0.0
        self._rows: Any = np.empty((max_points, len(Points._fields)))
        self._used = 0
        self._filled = 0  # values of the last point

    def add(self, step: float, value: float) -> None:
        """Adds a value."""
        self.count += 1
        finite = math.isfinite(value)
        self.nonfinite += not finite
        if finite:
            self._average = self._weight * self._average + (1 - self._weight) * value
            self._total = self._weight * self._total + (1 - self._weight)
        average = self._average / self._total if self._total else math.nan
        value = value if finite else math.nan
        if self._filled == self.stride or not self._used:
            if self._used == len(self._rows):
                self._halve()
            self._rows[self._used] = step, value, value, value, average
            self._used += 1
            self._filled = 1
            return
        row = self._rows[self._used - 1]
        self._filled += 1
        row[1] += (value - row[1]) / self._filled
        row[2], row[3], row[4] = np.fmin(row[2], value), np.fmax(row[3], value), average

    def _halve(self) -> None:
        rows = self._rows
        one, other = rows[0::2], rows[1::2]
        half = len(other)
        merged = np.stack(
            [
                one[:, 0], (one[:, 1] + other[:, 1]) / 2, np.fmin(one[:, 2], other[:, 2]),
                np.fmax(one[:, 3], other[:, 3]), other[:, 4],
            ],
            axis=1,
        )  # fmt: skip
        rows[:half] = merged
        self._used = half
        self.stride *= 2

    def points(self) -> Points:
        """A copy of the points."""
        return Points(*self._rows[: self._used].T.copy())


WIDTH_INCHES, HEIGHT_INCHES = 5.0, 3.2
"""Size of one panel."""


class Line(NamedTuple):
    """A curve as it is drawn: its label, its points, and whether points cover several values."""

    label: str
    points: Points
    thinned: bool


class Panel(NamedTuple):
    """One pair of axes: its title, whether its values have a logarithmic axis, and its lines."""

    title: str
    log: bool
    lines: Sequence[Line]


def matplotlib_figure() -> Any:
    """Returns the class `matplotlib.figure.Figure`.

    Raises:
        HostCallbackError: the package matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostCallbackError(
            "hcb.live_plot needs the package matplotlib: pip install 'hostcallback[plot]'"
        ) from error
    return Figure


def draw(panels: Sequence[Panel], smooth: bool) -> Any:
    """Returns a new figure with the panels side by side, at most three in a row."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = matplotlib_figure()(figsize=(WIDTH_INCHES * columns, HEIGHT_INCHES * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for line in panel.lines:
            _draw_line(axes, line, smooth)
        # Names are texts of the program: a dollar sign would begin a formula, which may not parse.
        axes.set_title(panel.title, parse_math=False)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if panel.log:
            axes.set_yscale("log", nonpositive="mask")
        if panel.lines and [line.label for line in panel.lines] != [panel.title]:
            for text in axes.legend(fontsize="small").get_texts():
                text.set_parse_math(False)
        elif not panel.lines:
            axes.text(0.5, 0.5, "no values yet", ha="center", va="center", transform=axes.transAxes)
    return figure


def _draw_line(axes: Any, line: Line, smooth: bool) -> None:
    points = line.points
    marker = "." if len(points.steps) == 1 else None
    shown = points.smooth if smooth else points.means
    (drawn,) = axes.plot(points.steps, shown, linewidth=1.5, marker=marker)
    drawn.set_label(line.label if not line.label.startswith("_") else f" {line.label}")  # "_" would hide it
    if smooth:
        axes.plot(points.steps, points.means, color=drawn.get_color(), alpha=0.3, linewidth=0.8)
    if line.thinned:
        axes.fill_between(points.steps, points.lows, points.highs, color=drawn.get_color(), alpha=0.15, lw=0)


def png(figure: Any) -> bytes:
    """The figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=90)
    return file.getvalue()


DUTY = 10
"""The thread rests this many times as long as it draws, so that drawing takes no more than a tenth of a core."""


def has_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = get_ipython() if get_ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """The output of a cell that is replaced while the program runs. Any thread may call `changed`."""

    def __init__(self, draw: Callable[[], bytes], every_sec: float) -> None:
        """Shows the PNG file that `draw` returns in the cell that runs now."""
        ipython: Any = importlib.import_module("IPython.display")
        self._image: Any = ipython.Image
        self._draw = draw
        self._every_sec = every_sec
        self._handle: Any = ipython.display(self._image(data=draw()), display_id=True)
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostcallback-live-plot", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Says that there is something new to show. Never blocks."""
        if not self._changed.is_set():
            self._changed.set()

    def close(self) -> None:
        """Ends the thread, and shows the last state."""
        self._closed.set()
        self._changed.set()
        self._thread.join()
        self._show()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._closed.is_set():
                return
            self._changed.clear()
            begin = monotonic()
            if not self._show():
                return
            if self._closed.wait(max(self._every_sec, DUTY * (monotonic() - begin))):
                return

    def _show(self) -> bool:
        try:
            self._handle.update(self._image(data=self._draw()))
        except Exception as error:  # a plot must not stop the program
            logger.warning("hcb.live_plot cannot draw: %s: %s", type(error).__name__, error)
            return False
        return True
