"""HTML for notebooks; every text in it is escaped."""

from __future__ import annotations

import html

from hostcallback.receiver.terminal import printable_lines


def preformatted(text: str) -> str:
    """Returns a text as HTML that shows it line by line. Control characters and markup in it have no effect."""
    return f"<pre>{html.escape(printable_lines(text))}</pre>"
