"""When what was written to a spool is sent: much at once, little a few times a second."""

from __future__ import annotations

import time

SEND_BYTES = 256 << 10
SEND_SEC = 0.1
"""What is less waits so long after the last piece: each piece costs both sides some wake-ups of threads."""

BUSY_SEC = 1.0
"""And so long while that one is not acknowledged: a collector that has much to do gets fewer pieces that bring more."""


class FlushPolicy:
    """Of one stream. Whoever owns it holds its lock."""

    def __init__(self, send_bytes: int = SEND_BYTES) -> None:
        """Nothing was sent; so many bytes are much, or `SEND_BYTES`."""
        self._send_bytes = min(send_bytes, SEND_BYTES)
        self._sent_at = -BUSY_SEC
        self._hurries = False
        self._written = 0
        self._is_idle = True

    def hurry(self) -> None:
        """What was written so far must not wait."""
        self._hurries = True

    def wrote(self, nbytes: int) -> bool:
        """Bytes were written; whether the sender is to look at them now."""
        self._written += nbytes
        return self._is_idle or self._hurries or self._written >= self._send_bytes

    def wait_sec(self, nbytes: int, *, acked: bool) -> float:
        """How long so many bytes are to wait before they are sent, unless more come.

        Args:
            nbytes: how many.
            acked: whether all that was sent is acknowledged.
        """
        self._is_idle = False
        if self._hurries or nbytes >= self._send_bytes:
            return 0.0
        return max(0.0, self._sent_at + (SEND_SEC if acked else BUSY_SEC) - time.monotonic())

    def sends(self, *, everything: bool) -> None:
        """A piece is sent now; whether it is the last there is."""
        self._sent_at = time.monotonic()
        self._written = 0
        self._hurries = self._hurries and not everything

    def has_nothing(self) -> None:
        """All that was written is sent: what comes next is to be looked at."""
        self._is_idle = True
