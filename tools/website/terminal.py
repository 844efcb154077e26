"""Pictures of what a terminal shows, as SVG files."""

from __future__ import annotations

import re
import textwrap
from html import escape

COLUMNS = 84
ROWS = 24
FONT_PX, LINE_PX, CHARACTER_PX = 13, 19, 7.83
PAD_PX, BAR_PX = 16, 30
FONT = "ui-monospace, SF Mono, Cascadia Code, Roboto Mono, DejaVu Sans Mono, monospace"
BUTTONS = ("#ff7f76", "#e5b04a", "#5fd08c")
STYLES = (
    (re.compile(r"^\$ "), "#7ea6ff"),
    (re.compile(r"error|fail|nan\b|killed|SIGKILL|infinite", re.IGNORECASE), "#ff9f5a"),
)
"""What a line of a kind is coloured with: commands, and what went wrong."""


def picture(text: str, columns: int = COLUMNS, rows: int = ROWS) -> str:
    """Returns an SVG of the first rows of a text, wrapped as a terminal of that width wraps them."""
    lines = [line for raw in text.expandtabs().splitlines() for line in wrapped(raw, columns)]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], "..."]
    width = max(columns * CHARACTER_PX + 2 * PAD_PX, 1)
    height = BAR_PX + len(lines) * LINE_PX + PAD_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="{FONT}" '
        f'font-size="{FONT_PX}">',
        '<rect width="100%" height="100%" rx="9" fill="#161b22"/>',
        *(
            f'<circle cx="{18 + 18 * number}" cy="16" r="5.5" fill="{color}"/>'
            for number, color in enumerate(BUTTONS)
        ),
    ]
    for number, line in enumerate(lines):
        color = next((color for pattern, color in STYLES if pattern.search(line)), "#d3dae4")
        parts.append(
            f'<text x="{PAD_PX}" y="{BAR_PX + 12 + number * LINE_PX}" fill="{color}" xml:space="preserve" '
            f'textLength="{len(line) * CHARACTER_PX:.1f}" lengthAdjust="spacingAndGlyphs">{escape(line)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def wrapped(line: str, columns: int) -> list[str]:
    """Returns the rows that a line takes."""
    return textwrap.wrap(line, columns, replace_whitespace=False, drop_whitespace=False) or [""]
