"""Errors between a process and its collector.

RemoteError                 (a HostCallbackError)
|-- TransportError          the collector cannot be reached, or the connection broke: the process retries
|   `-- StreamRefusedError  the collector refuses this stream: retrying does not help
|-- BadStreamError          a client sends bytes that are not a stream of a tap log
|   `-- GapError            the bytes between the stored ones and the next are missing
`-- SpoolError              a spool's folder cannot be used
"""

from __future__ import annotations

from hostcallback.receiver.errors import HostCallbackError


class RemoteError(HostCallbackError):
    """An error between a process and its collector."""


class TransportError(RemoteError):
    """The collector cannot be reached, or the connection broke."""


class StreamRefusedError(TransportError):
    """The collector refuses this stream; retrying does not help."""


class BadStreamError(RemoteError):
    """A client sends bytes that are not a stream of a tap log."""


class GapError(BadStreamError):
    """Bytes are missing between the stored part of a stream and its next slice."""


class SpoolError(RemoteError):
    """The folder of a spool cannot be used."""
