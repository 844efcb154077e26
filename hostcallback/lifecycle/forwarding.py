"""Opens and closes the forwarder of a receiver; the index of this process in its program, for collectors and logs."""

from __future__ import annotations

import uuid

import jax

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle.receivers import device_name
from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.signals import watch_termination

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


class ForwardingWarning(UserWarning):
    """A receiver delivered messages that its collector does not have, or does not have yet.

    Example:
        warnings.simplefilter("error", hcb.ForwardingWarning)  # messages that the collector lacks are an error
    """


def open_forwarder(options: Forward) -> Forwarder:
    """Opens a forwarder. At SIGTERM it also forwards the messages that the devices have emitted by then.

    Raises:
        HostCallbackError: the spool cannot be made, or a file is not a certificate or key.
    """
    devices = {device_name(device): number for number, device in enumerate(jax.local_devices())}
    forwarder = Forwarder(options, process_index=process_index(), local_devices=devices, job=job())
    watch_termination.add(forwarder)
    return forwarder


def end_forwarding(forwarder: Forwarder, *, drain_sec: float | None = None) -> list[str]:
    """Waits up to `drain_sec` for the collector, and returns what to warn of: messages that it does not have.

    Args:
        forwarder: the forwarder of the receiver.
        drain_sec: seconds to wait, if less than the forwarder's own.
    """
    if drain_sec is not None:
        forwarder.limit_drain(drain_sec)
    # Unregistered only after it is closed: a SIGTERM during the wait must still reach it.
    forwarder.close()
    watch_termination.remove(forwarder)
    return forwarder.missing()
