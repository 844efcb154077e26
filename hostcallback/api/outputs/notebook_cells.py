"""In a notebook, a cell ends when its taps have arrived, so that what they print is the cell's output."""

from __future__ import annotations

import sys
from typing import Any

from hostcallback.api.barrier import wait_for_taps
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.interactive import show_new_failures

_watched: Any = None  # the shell whose cells end with a wait


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
    try:
        wait_for_taps()
        show_new_failures()
    except KeyboardInterrupt:
        logger.warning(
            "the wait for the taps of this cell was interrupted: what they print comes in later cells"
        )
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


watch_cells()
