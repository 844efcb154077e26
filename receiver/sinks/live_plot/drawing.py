"""Draws curves with matplotlib, without a window and without pyplot's global figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.sinks.live_plot.curve import Points

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
