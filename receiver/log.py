"""The package's one logger, `hostcallback`, and the environment variable that sets its level."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("hostcallback")

LEVEL_VARIABLE = "HOSTCALLBACK_LOG_LEVEL"


def set_level_from_environment() -> None:
    """Sets the logger's level from `HOSTCALLBACK_LOG_LEVEL` (a name such as DEBUG, or a number).

    Raises:
        ValueError: the variable holds neither a level's name nor a number.
    """
    text = os.environ.get(LEVEL_VARIABLE, "").strip()
    if not text:
        return
    level = int(text) if text.isdigit() else logging.getLevelNamesMapping().get(text.upper())
    if level is None:
        names = ", ".join(logging.getLevelNamesMapping())
        raise ValueError(f"{LEVEL_VARIABLE}={text!r} is not a logging level: use one of {names}, or a number")
    logger.setLevel(level)


set_level_from_environment()
