"""Ctrl-C while the main thread keeps the books: it must not come in the middle of them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which take 3 us a call
import threading
from types import FrameType
from typing import Any

_getsignal, _set, _SIGINT = _signal.getsignal, _signal.signal, _signal.SIGINT
_main_thread = threading.main_thread()


class HeldInterrupts:
    """Keeps the calling thread from being interrupted by SIGINT, from when it is made until `end`.

    Only the main thread is ever interrupted: on others it does nothing.

    Attributes:
        noted: whether there was an interrupt meanwhile. Whoever holds them back has to see that it is raised later.
    """

    __slots__ = ("_handler", "noted")

    def __init__(self) -> None:
        """Holds them back from now on."""
        self.noted = False
        self._handler: Any = None  # the user's
        if threading.current_thread() is _main_thread:
            handler = _getsignal(_SIGINT)
            if callable(handler):  # else nothing of Python's runs
                self._handler = handler
                self.hold()

    def hold(self) -> None:
        """Holds them back again, after `allow`."""
        if self._handler is not None:
            _set(_SIGINT, self._note)

    def allow(self) -> None:
        """Lets them through, until `hold`: for code of the user."""
        if self._handler is not None:
            _set(_SIGINT, self._handler)

    end = allow

    def note(self, error: BaseException) -> None:
        """Takes note of what code of the user raised: on the main thread a KeyboardInterrupt is the user's."""
        if self._handler is not None and isinstance(error, KeyboardInterrupt):
            self.noted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
