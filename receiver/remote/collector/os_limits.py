"""The memory of a process that takes large messages: what it freed is used again, not fetched from the kernel anew."""

from __future__ import annotations

import contextlib
import ctypes

KEPT_BYTES = 64 << 20
"""As much freed memory may be kept, in each arena."""

ARENAS = 2

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Tells glibc's allocator, for the whole process. Does nothing where there is another one.

    By default it gives back to the kernel what a message of 1 MiB took, after each message, and then half of the time
    of receiving goes into getting empty pages for the next one.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
