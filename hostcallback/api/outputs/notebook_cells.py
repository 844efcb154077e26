"""In a notebook, a cell ends when its taps have arrived, so that what they print is the cell's output."""

from __future__ import annotations

import contextlib
import sys
from time import perf_counter
from typing import Any

from hostcallback.api.barrier import wait_for_taps
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.interactive import show_new_failures
from hostcallback.sync import inflight

OTHERS_SEC = 0.05
"""Seconds in which other threads' programs end, if they were about to, when those of the cell have ended."""

LATER_SEC = 0.5
"""Seconds that a cell waits for messages at most while programs run that it did not start."""

_watched: Any = None  # the shell whose cells end with a wait
_interrupted = False  # whether a wait was interrupted, so that programs of an earlier cell may run


def watch_cells() -> None:
    """Waits for taps at the end of each cell, if this process is the kernel of a notebook. Once per shell."""
    global _watched
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = get_ipython() if get_ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None and shell is not _watched:
        _watched = shell
        shell.events.register("post_run_cell", _end_cell)


def _end_cell(*_: Any) -> None:
    # The receiver threads print to the cell that runs. A failure that came during the wait is shown here too: its own
    # hook may have been registered too late for this cell.
    global _interrupted
    try:
        deadline = perf_counter() + LATER_SEC if _interrupted or _others_run() else None
        with contextlib.suppress(TapTimeoutError):
            wait_for_taps(deadline=deadline)
            _interrupted = False
        show_new_failures()
    except KeyboardInterrupt:
        _interrupted = True
        logger.warning(
            "the wait for the taps of this cell was interrupted: what they print comes in later cells"
        )
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _others_run() -> bool:
    # Waits for the programs of the cell. Returns whether others run, such as a training in another thread.
    inflight.wait_for_this_thread()
    try:
        inflight.wait(perf_counter() + OTHERS_SEC, lambda: None)
    except TapTimeoutError:
        return True
    return False


watch_cells()
