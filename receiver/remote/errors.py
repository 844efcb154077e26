"""What goes wrong between a process and its collector.

RemoteError             (a HostCallbackError)
|-- LinkError           the collector cannot be reached, or the connection broke: it is tried again
|   `-- LinkRefusedError  it does not want this stream: trying again would not help
|-- BadStreamError      what a client sends is no stream of a tap log
|   `-- GapError        it goes on behind what is stored
`-- SpoolError          a spool's folder cannot be used
"""

from __future__ import annotations

from receiver.errors import HostCallbackError


class RemoteError(HostCallbackError):
    """Something between a process and its collector."""


class LinkError(RemoteError):
    """The collector cannot be reached, or the connection broke."""


class LinkRefusedError(LinkError):
    """The collector does not want this stream, whenever it is tried."""


class BadStreamError(RemoteError):
    """What a client sends is no stream of a tap log."""


class GapError(BadStreamError):
    """A stream goes on behind what is stored of it."""


class SpoolError(RemoteError):
    """A spool's folder cannot be used."""
