"""Makes the sending side of the broker that an address names."""

from __future__ import annotations

from typing import Protocol

from hostcallback.receiver.remote import brokers
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.transport import Transport
from hostcallback.receiver.remote.streams import StreamKey


class Control(Protocol):
    """A running thread that answers requests to this process that come through its collector."""

    def stop(self) -> None:
        """Ends it."""


def make_transport(options: Forward) -> Transport:
    """The transport to the address in the options.

    Raises:
        ValueError: the address is invalid.
        HostCallbackError: a package is missing, or a file is not a certificate or a key.
        OSError: a file cannot be read.
    """
    made: Transport = brokers.load(options.broker.transport)(options)
    return made


def start_control(options: Forward, transport: Transport, key: StreamKey) -> Control | None:
    """Answers requests to the process of a stream from now on; None if the broker carries none."""
    if not options.broker.control:
        return None
    started: Control | None = brokers.load(options.broker.control)(transport, key)
    return started
