"""Operating-system settings of a collector: many open files, and an allocator that keeps freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource

WANTED_FILES = 1 << 20
"""Wanted number of open files: two per stream, which exceeds the default limit of most systems."""

KEPT_BYTES = 64 << 20
"""Bytes of freed memory that each arena may keep."""

ARENAS = 2

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Tells glibc's allocator to keep freed memory, for the whole process. Does nothing with another allocator.

    By default the allocator returns the memory of each 1 MiB message to the kernel, and half of the time of receiving
    goes into faulting empty pages in for the next one.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as the system allows."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if most == resource.RLIM_INFINITY else min(WANTED_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
