"""How many files a collector may have open: two for each stream, which is more than most systems allow at first."""

from __future__ import annotations

import contextlib
import resource

WANTED = 1 << 20


def allow_many_files() -> None:
    """Lets this process open as many files as it may allow itself."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if most == resource.RLIM_INFINITY else min(WANTED, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has another bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
