"""Text from outside this process, made safe for a terminal and for a log file.

All such text goes through `printable`, or through `printable_lines` where it may have several lines.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns the text on one line: control characters, line ends and bidi controls as Python's escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
    """Returns a report, whose lines but the first begin with two spaces: lines that do not were smuggled into it."""
    first, *others = printable_lines(text).split("\n")
    return "\n".join(
        [first, *(line if line.startswith("  ") or not line else f"    {line}" for line in others)]
    )
