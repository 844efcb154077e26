"""The index of this process in its program, and the id of the program run, for logs and collectors."""

from __future__ import annotations

import uuid

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.log import logger

KEY = "hostcallback/job"
RUN_KEY = "hostcallback/run"
TIMEOUT_SEC = 10.0


_run = ""


def _common_run(own: str) -> str:
    # The name of the run that the first process to ask gave; the own one before jax.distributed is initialized.
    global _run
    if not _run:
        try:
            _run = compat.shared_value(RUN_KEY, own, TIMEOUT_SEC) or ""
        except jax.errors.JaxRuntimeError as error:
            # Kept, so that this process does not change its name when the coordinator answers later.
            _run = own
            logger.warning(
                "the coordinator of jax.distributed does not answer, so this process is a separate run, %s: %s",
                own, str(error).partition("\n")[0],
            )  # fmt: skip
    return _run or own


processes.agree_by(_common_run)


def process_index() -> int | None:
    """Returns the index of this process in a program of several processes; None for a single process."""
    return jax.process_index() if jax.process_count() > 1 else None


def job() -> str:
    """Returns the id of this run of the program, equal in all its processes; an empty text for a single process.

    The first process that asks makes the id and stores it at the coordinator of `jax.distributed`, where the others
    read it. Blocks for one round trip to the coordinator.
    """
    if jax.process_count() == 1:
        return ""
    try:
        return compat.shared_value(KEY, uuid.uuid4().hex, TIMEOUT_SEC) or ""
    except jax.errors.JaxRuntimeError as error:
        logger.warning(
            "the coordinator of jax.distributed does not answer, so readers of the log or the collector cannot tell "
            "which processes belong together, and show shards of arrays separately: %s",
            str(error).partition("\n")[0],
        )
        return ""
