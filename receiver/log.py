"""The package's one logger, `hostcallback`, and the environment variable that sets its level."""

from __future__ import annotations

import logging

from hostcallback.receiver import environment

logger = logging.getLogger("hostcallback")


def set_level_from_environment() -> None:
    """Sets the logger's level from `HOSTCALLBACK_LOG_LEVEL` (a name such as DEBUG, or a number).

    Raises:
        ValueError: the variable holds neither a level's name nor a number.
    """
    level = environment.LOG_LEVEL.read()
    if level is not None:
        logger.setLevel(level)


set_level_from_environment()
