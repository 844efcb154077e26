"""Text that people see: made safe for terminals, logs and HTML, and free of passwords and tokens.

All such text goes through `printable`, or through `printable_lines` where it may have several lines. A text that comes
from another program (the status of a call, the `error` of an answer) goes through `foreign` where it arrives, so that
whatever is made of it (an exception, a warning, a log line) is safe; `make lint` checks this.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any


def printable(text: str) -> str:
    """Returns the text on one line: control characters, line ends and bidi controls as Python's escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Formats a table whose columns are as wide as their longest text.

    Args:
        head: titles of the columns.
        rows: texts.
        left: indices of the columns that are aligned to the left; the others are aligned to the right.
    """
    rows = [[*map(printable, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return [line(head), *map(line, rows)]


def say(text: str) -> None:
    """Writes a text and a line end to the standard error output at once; nothing where it is closed.

    `print` writes the line end apart where the output is unbuffered, and a tap's line of another thread comes between.
    """
    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


FOREIGN_CHARS = 2000
"""Characters of a foreign text that are shown."""


def foreign(text: object) -> str:
    """Returns a text of another program as `printable` does, cut after `FOREIGN_CHARS`; empty for None."""
    return "" if text is None else printable(str(text)[:FOREIGN_CHARS])


def printable_lines(text: str, indent: str = "") -> str:
    """Returns the text with its lines and tabs, and all other such characters escaped.

    Args:
        text: one line or several.
        indent: what each line but the first begins with, so that no line can pass for another program's.
    """
    if text.isprintable():
        return text
    # Not by `splitlines`, to which more characters than the line feed end a line.
    lines = ("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    return f"\n{indent}".join(lines)


def printable_report(text: str) -> str:
    """Returns a report with all lines but the first indented, so that none can pose as another line of output."""
    first, *others = printable_lines(text).split("\n")
    return "\n".join(
        [first, *(line if line.startswith("  ") or not line else f"    {line}" for line in others)]
    )


_BETWEEN = re.compile(r",(?=\s*[A-Za-z][A-Za-z0-9+.-]*://)")

_CREDENTIAL = re.compile(r"auth|token|secret|password|cookie|key", re.IGNORECASE)


def without_password(url: str) -> str:
    """A URL, or several with commas between, without users and passwords, for messages.

    A password may hold any characters, also those that should have been escaped: of each URL, everything up to the last
    "@" is left out.
    """
    return ",".join(_without(part) for part in _BETWEEN.split(url))


def _without(url: str) -> str:
    if "@" not in url:
        return url
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2]
    return scheme + separator + rest.rpartition("@")[2]


def command_line(arguments: list[str]) -> list[str]:
    """The arguments of a command, without the users and passwords of URLs."""
    return [without_password(word) if "://" in word else word for word in arguments]


def is_credential(header: str) -> bool:
    """Whether a header's name says that its value is secret."""
    return _CREDENTIAL.search(header) is not None


def is_printable(secret: object) -> bool:
    """Whether a secret can be sent in a header. If not, libraries would repeat it in the text of their error."""
    return isinstance(secret, str) and secret.isascii() and secret.isprintable()


def representation(options: Any, *, urls: tuple[str, ...], secrets: tuple[str, ...]) -> str:
    """The `repr` of a dataclass, with the fields `urls` without passwords, and with the fields `secrets` hidden."""
    shown = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in secrets and value:
            shown.append(f"{field.name}=<hidden>")
            continue
        text = repr(without_password(value) if isinstance(value, str) else value)
        shown.append(f"{field.name}={text if field.name in urls else repr(value)}")
    return f"{type(options).__name__}({', '.join(shown)})"


def preformatted(text: str) -> str:
    """Returns a text as HTML that shows it line by line. Control characters and markup in it have no effect."""
    # Notebooks that are converted to HTML would show it in the font of running text.
    return f'<pre style="font-family: monospace">{html.escape(printable_lines(text))}</pre>'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """Returns an HTML table, with a row of heads and the texts of the cells."""
    lines = [f"<caption>{_cell(caption)}</caption>"] if caption else []
    lines.append("<tr>" + "".join(f"<th>{_cell(name)}</th>" for name in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def _cell(value: Any) -> str:
    return html.escape(printable_lines(str(value)))


def array(value: Any) -> str:
    """Returns an array as HTML: by treescope if that is installed, else as its text."""
    try:
        treescope = importlib.import_module("treescope")
    except ImportError:
        return preformatted(repr(value))
    return str(treescope.render_to_html(value, ignore_exceptions=True, compressed=True))


def duration_text(seconds: float) -> str:
    """Returns seconds as text with three digits, such as `1.25 ms`."""
    if math.isnan(seconds):
        return "-"
    if seconds >= 1000:
        return f"{seconds:.0f} s"
    size, unit = next((each for each in ((1.0, "s"), (1e-3, "ms")) if seconds >= each[0]), (1e-6, "us"))
    return f"{seconds / size:.3g} {unit}"
