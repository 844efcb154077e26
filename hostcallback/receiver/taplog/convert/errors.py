"""The error of conversions."""

from __future__ import annotations

from hostcallback.receiver.errors import HostCallbackError


class ConvertError(HostCallbackError):
    """A log cannot be converted as the user asked; the text tells why."""
