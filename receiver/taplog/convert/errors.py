"""What is wrong when a log cannot be converted."""

from __future__ import annotations

from receiver.errors import HostCallbackError


class ConvertError(HostCallbackError):
    """A log cannot be converted as it was asked for; the text is for its user."""
