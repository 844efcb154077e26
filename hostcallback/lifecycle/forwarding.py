"""Forwarding of a receiver's messages: begun and ended with it, what is sent first at SIGTERM."""

from __future__ import annotations

import warnings

import jax

from hostcallback.lifecycle import receivers as transport
from hostcallback.lifecycle.process_group import job, process_index
from hostcallback.lifecycle.termination import end_flushing, flush_at_termination
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.isolated.reader_process import ReceiverProcess


class ForwardingWarning(UserWarning):
    """A receiver delivered messages that its collector does not have, or not yet."""


def local_devices() -> dict[str, int]:
    """By name, the number of each device among this process's own."""
    return {name: place for place, name in enumerate(map(transport.device_name, jax.local_devices()))}


def open_forwarder(options: Forward) -> Forwarder:
    """Forwards from now on, also what the devices have emitted when SIGTERM comes.

    Raises:
        HostCallbackError: the spool cannot be made, or a file is no certificate or key.
    """
    forwarder = Forwarder(options, process_index=process_index(), local_devices=local_devices(), job=job())
    flush_at_termination(forwarder)
    return forwarder


def send_at_termination(process: ReceiverProcess) -> None:
    """Has a receiver's process send what there is when SIGTERM comes."""
    flush_at_termination(process)


def end_forwarding(forwarder: Forwarder, process: ReceiverProcess | None) -> None:
    """Waits for the collector, `drain_sec` at most, and warns of what it does not have.

    Args:
        forwarder: what forwarded.
        process: the receiver's process that forwarded as well, if there was one; it has ended.
    """
    forwarder.close()
    end_flushing(forwarder)
    outcomes = [forwarder.outcome()]
    if process is not None:
        end_flushing(process)
        outcomes += filter(None, [process.forwarded])
    for outcome in outcomes:
        if outcome.lost_messages:
            warnings.warn(
                f"{outcome.lost_messages} message(s) were not forwarded: {outcome.failure}. The collector is told "
                "which",
                ForwardingWarning,
                stacklevel=3,  # who leaves the receiver
            )
        if outcome.unsent_bytes:
            warnings.warn(
                f"{outcome.unsent_bytes} bytes of messages were not forwarded yet: {outcome.why}. They stay in "
                f"{outcome.folder}; the next process of the run {forwarder.options.run!r} sends them",
                ForwardingWarning,
                stacklevel=3,  # who leaves the receiver
            )
