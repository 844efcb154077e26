"""Which of a program's processes this is, and which life of the program: said in what is written for others to read."""

from __future__ import annotations

import uuid

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver.log import logger

KEY = "hostcallback/job"
TIMEOUT_SEC = 10.0


def process_index() -> int | None:
    """This process's number in a program of several; None in a program of one."""
    return jax.process_index() if jax.process_count() > 1 else None


def job() -> str:
    """A text that is alike in all processes of the program, and in no other life of it; empty in a program of one.

    The first process that asks makes it and leaves it with the coordinator of `jax.distributed`, where the others find
    it. Blocks for one round trip to the coordinator.
    """
    if jax.process_count() == 1:
        return ""
    try:
        return compat.shared_value(KEY, uuid.uuid4().hex, TIMEOUT_SEC) or ""
    except jax.errors.JaxRuntimeError as error:
        logger.warning(
            "the coordinator of jax.distributed does not answer, so readers of the log or the collector cannot tell "
            "which processes belong together, and show shards of arrays by themselves: %s",
            str(error).partition("\n")[0],
        )
        return ""
