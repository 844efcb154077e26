"""Shows an object in a cell of a notebook, and again in place at most so often, on a separate thread."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from hostcallback.receiver.log import logger

DUTY = 10
"""The thread rests this many times as long as it draws, so that drawing takes no more than a tenth of a core."""


def has_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = get_ipython() if get_ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """The output of a cell that is replaced while the program runs. Any thread may call `changed`."""

    def __init__(self, draw: Callable[[], bytes], every_sec: float) -> None:
        """Shows the PNG file that `draw` returns in the cell that runs now."""
        ipython: Any = importlib.import_module("IPython.display")
        self._image: Any = ipython.Image
        self._draw = draw
        self._every_sec = every_sec
        self._handle: Any = ipython.display(self._image(data=draw()), display_id=True)
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostcallback-live-plot", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Says that there is something new to show. Never blocks."""
        if not self._changed.is_set():
            self._changed.set()

    def close(self) -> None:
        """Ends the thread, and shows the last state."""
        self._closed.set()
        self._changed.set()
        self._thread.join()
        self._show()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._closed.is_set():
                return
            self._changed.clear()
            begin = monotonic()
            if not self._show():
                return
            if self._closed.wait(max(self._every_sec, DUTY * (monotonic() - begin))):
                return

    def _show(self) -> bool:
        try:
            self._handle.update(self._image(data=self._draw()))
        except Exception as error:  # a plot must not stop the program
            logger.warning("hcb.live_plot cannot draw: %s: %s", type(error).__name__, error)
            return False
        return True
