"""The package's one logger, `hostcallback`, and the environment variable that sets its level."""

from __future__ import annotations

import logging

from hostcallback.receiver import environment
from hostcallback.receiver.terminal import printable, printable_lines

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
            record.exc_text = printable_lines(logging.Formatter().formatException(record.exc_info))
        return True


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
