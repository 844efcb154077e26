"""What a collector asks of the operating system: many open files, and memory that is used again after it was freed."""

from __future__ import annotations

import contextlib
import ctypes
import resource

WANTED_FILES = 1 << 20
"""Two for each stream, which is more than most systems allow at first."""

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


def allow_many_files() -> None:
    """Lets this process open as many files as it may allow itself."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if most == resource.RLIM_INFINITY else min(WANTED_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
