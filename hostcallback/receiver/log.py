"""The package's one logger, `hostcallback`, the environment variable that sets its level, and texts of exceptions."""

from __future__ import annotations

import logging
import traceback

from hostcallback.receiver import environment
from hostcallback.receiver.text import printable, printable_lines

logger = logging.getLogger("hostcallback")


class _SafeText(logging.Filter):
    # Records may quote streams and files: no escape sequence and no forged record gets through.

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.isprintable():
            record.msg, record.args = printable_lines(text, INDENT), None
        for name in ("pathname", "filename", "module", "funcName"):  # a described check tells where it is
            value = getattr(record, name)
            if isinstance(value, str) and not value.isprintable():
                setattr(record, name, printable(value))
        if record.exc_info and not record.exc_text:
            record.exc_text = printable_lines(_traceback(record.exc_info[1]))
        return True


def traceback_text(error: BaseException, limit: int | None = None) -> str:
    """The text of an exception and its traceback, as Python prints it, but without marks below the source lines.

    Python finds the marks by parsing the lines, and its parser counts its depth once per process (in 3.11 at least). If
    two threads parse at a time, one may raise `SystemError: AST constructor recursion depth mismatch`: the main thread,
    while it imports a module or rewrites a test's assertions, and a receiver thread writes a failure down.

    Args:
        error: with its traceback, causes, notes and, if it is a group, members.
        limit: at most that many frames of each traceback, counted from its end if negative.

    Raises:
        Exception: `str(error)` did.
    """
    whole = traceback.TracebackException(type(error), error, error.__traceback__, limit=limit, compact=True)
    parts: list[traceback.TracebackException | None] = [whole]
    while parts:
        part = parts.pop()
        if part is None:
            continue
        for frame in part.stack:
            frame.colno = frame.end_colno = None  # where the marks would be
        parts += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    return "".join(whole.format())


def _traceback(error: BaseException | None) -> str:
    return "" if error is None else traceback_text(error).rstrip("\n")


INDENT = "    "
"""What the lines of a record but the first begin with."""

logger.addFilter(_SafeText())


def set_level_from_environment() -> None:
    """Sets the logger's level from `HOSTCALLBACK_LOG_LEVEL` (a name such as DEBUG, or a number).

    Raises:
        ValueError: the variable holds neither a level's name nor a number.
    """
    level = environment.LOG_LEVEL.read()
    if level is not None:
        logger.setLevel(level)


set_level_from_environment()
