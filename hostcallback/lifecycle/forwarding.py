"""Opens and closes the forwarder of a receiver, and registers it for SIGTERM."""

from __future__ import annotations

import jax

from hostcallback.lifecycle import receivers as transport
from hostcallback.lifecycle.flush_at_termination import end_flushing, flush_at_termination
from hostcallback.lifecycle.process_group import job, process_index
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward


class ForwardingWarning(UserWarning):
    """A receiver delivered messages that its collector does not have, or does not have yet.

    Example:
        warnings.simplefilter("error", hcb.ForwardingWarning)  # messages that the collector lacks are an error
    """


def local_devices() -> dict[str, int]:
    """Returns, by name, the index of each device among the local devices of this process."""
    return {name: place for place, name in enumerate(map(transport.device_name, jax.local_devices()))}


def open_forwarder(options: Forward) -> Forwarder:
    """Opens a forwarder. At SIGTERM it also forwards the messages that the devices have emitted by then.

    Raises:
        HostCallbackError: the spool cannot be made, or a file is not a certificate or key.
    """
    forwarder = Forwarder(options, process_index=process_index(), local_devices=local_devices(), job=job())
    flush_at_termination(forwarder)
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
    end_flushing(forwarder)
    outcome = forwarder.outcome()
    found = []
    if outcome.lost_messages:
        found.append(
            f"{outcome.lost_messages} message(s) were not forwarded: {outcome.failure}. The collector is told which"
        )
    if outcome.unsent_bytes:
        found.append(
            f"{outcome.unsent_bytes} bytes of messages were not forwarded yet: {outcome.why}. They stay in "
            f"{outcome.folder}; the next process of the run {forwarder.run!r} sends them"
        )
    return found
