"""Draws the charts of docs/benchmarks.md from the rows of its table: `python tools/bench.py --charts`.

Text stays text in the SVG files, so a search of the page, and the tests, find the figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tools.documents.costs import Cost

CALLBACKS = re.compile(
    r"jax\.debug|io_callback|itself, not accelerated|checkify|jax_debug_nans|bare loop|jax-tqdm"
)
UNTAPPED = re.compile(r"untapped|unchecked|unwatched|without|empty FFI call|no bar|plain loop")

CHARTS = {
    "peers": ("Times as fast as the alternative", CALLBACKS),
    "costs": ("Time relative to the same program without taps", UNTAPPED),
    "limits": ("Time relative to the limit that we set", re.compile(r"^the limit$")),
}
"""Title of each chart and the peers whose rows it shows."""

FOLD_BEGINS = '<details markdown="1"><summary>The table</summary>\n\n'
FOLD_ENDS = "\n</details>\n"

UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(figure: str) -> float | None:
    """Returns a figure such as `0.98 us/message` in seconds; None if it is no time, or 0."""
    number, _, unit = figure.partition(" ")
    scale = UNITS.get(unit.partition("/")[0])
    return float(number) * scale if scale is not None and float(number) > 0 else None


def bars(name: str, costs: Sequence[Cost]) -> list[tuple[str, float, str]]:
    """Returns the label, the ratio and the figures of each bar of a chart, the largest ratio first."""
    found = []
    for cost in costs:
        ours, peer = seconds(cost.ours), seconds(cost.peer)
        if CHARTS[name][1].search(cost.peer_name) and ours is not None and peer is not None:
            ratio = 1 / cost.ratio if name == "peers" else cost.ratio
            label = cost.name.replace("`", "")
            if name != "limits":
                label += f" | {cost.peer_name.replace('`', '')}"
            found.append((label, ratio, f"{ratio:.3g} ({cost.ours} : {cost.peer})"))
    return sorted(found, key=lambda bar: bar[1])


def draw(name: str, costs: Sequence[Cost], path: Path) -> None:
    """Writes a chart: horizontal bars on a logarithmic scale, with a line at 1."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = bars(name, costs)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(14, 0.7 + 0.28 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        better = [ratio >= 1 if name == "peers" else ratio <= 1 for _, ratio, _ in rows]
        colors = ["#3f51b5" if good else "#b0563f" for good in better]
        drawn = axes.barh(range(len(rows)), [ratio for _, ratio, _ in rows], color=colors)
        axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
        axes.bar_label(drawn, [text for _, _, text in rows], padding=3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel=CHARTS[name][0])
        low, high = axes.get_xlim()
        axes.set_xlim(low, high**1.7 if high > 10 else high * 10)
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def write(costs: Sequence[Cost], folder: Path) -> str:
    """Draws all charts into a folder. Returns the text that shows them in the page above the folder."""
    for name in CHARTS:
        draw(name, costs, folder / f"{name}.svg")
    return markdown(folder.name)


def markdown(folder: str) -> str:
    """Returns the text that shows the charts."""
    return "\n\n".join(
        f"### {title}\n\n![{title}]({folder}/{name}.svg)" for name, (title, _) in CHARTS.items()
    )


def redraw(report: Path) -> None:
    """Draws the charts of a page that exists, and puts them before its table."""
    from tools.documents import costs as document_costs

    text = report.read_text(encoding="utf-8")
    shown = write(document_costs.read_costs(text), report.parent / "benchmarks")
    text = re.sub(r"## Charts\n.*?(?=^\| what )", "", text, flags=re.DOTALL | re.MULTILINE).replace(
        FOLD_ENDS, ""
    )
    begins = text.index("| what | ours |")
    ends = begins + text[begins:].index("\n\n") + 1
    folded = f"{section(shown)}{FOLD_BEGINS}{text[begins:ends]}{FOLD_ENDS}"
    report.write_text(f"{text[:begins]}{folded}{text[ends:]}", encoding="utf-8")


def section(shown: str) -> str:
    """Returns the text between the explanation and the table."""
    scale = "Blue bars are better than 1, red ones worse. The scale is logarithmic."
    return f"## Charts\n\n{scale}\n\n{shown}\n\n## All rows\n\n"
