"""Decides when spooled data is sent: large amounts at once, small amounts at most ten times per second."""

from __future__ import annotations

import time

SEND_BYTES = 256 << 10
SEND_SEC = 0.1
"""Seconds between slices of less than `SEND_BYTES`: each slice wakes several threads on both sides."""

BUSY_SEC = 1.0
"""The same while the last slice is not acknowledged: a busy collector gets fewer and larger slices."""


class FlushPolicy:
    """The flush policy of one stream. Its owner's lock protects it."""

    def __init__(self, send_bytes: int = SEND_BYTES) -> None:
        """No data was sent yet. `send_bytes` is the amount that is sent at once; at most `SEND_BYTES`."""
        self._send_bytes = min(send_bytes, SEND_BYTES)
        self._sent_at = -BUSY_SEC
        self._hurries = False
        self._written = 0
        self._is_idle = True

    def hurry(self) -> None:
        """Has all data written so far sent without waiting."""
        self._hurries = True

    def wrote(self, nbytes: int) -> bool:
        """Notes that bytes were written; returns whether the sender should look at them now."""
        self._written += nbytes
        return self._is_idle or self._hurries or self._written >= self._send_bytes

    def wait_sec(self, nbytes: int, *, acked: bool) -> float:
        """Returns the seconds for which `nbytes` wait before they are sent, unless more are written.

        Args:
            nbytes: unsent bytes.
            acked: whether all sent data is acknowledged.
        """
        self._is_idle = False
        if self._hurries or nbytes >= self._send_bytes:
            return 0.0
        return max(0.0, self._sent_at + (SEND_SEC if acked else BUSY_SEC) - time.monotonic())

    def sends(self, *, everything: bool) -> None:
        """Notes that a slice is sent now. `everything`: it contains all unsent data."""
        self._sent_at = time.monotonic()
        self._written = 0
        self._hurries = self._hurries and not everything

    def has_nothing(self) -> None:
        """Notes that all written data is sent, so that the sender looks at the next write."""
        self._is_idle = True
