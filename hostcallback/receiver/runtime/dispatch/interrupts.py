"""Delays Ctrl-C while the main thread updates the state of a call, which an exception would leave half done."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enumerations, which take 3 us a call
import threading
from types import FrameType
from typing import Any

# From `_signal`: the functions of `signal` are slower, since they convert to enums and back, and each call
# uses them several times.
_getsignal, _set, _SIGINT = _signal.getsignal, _signal.signal, _signal.SIGINT
_main_thread = threading.main_thread()


class HeldInterrupts:
    """Delays SIGINT on the calling thread from construction until `end`.

    Python interrupts only the main thread, so on other threads this does nothing.

    Attributes:
        noted: whether an interrupt came meanwhile. The caller must raise it later.
    """

    __slots__ = ("_handler", "noted")

    def __init__(self) -> None:
        """Delays interrupts from now on."""
        self.noted = False
        self._handler: Any = None  # the handler that was installed before
        # Python runs handlers on its main thread only, and lets no other thread set them.
        if threading.current_thread() is _main_thread:
            handler = _getsignal(_SIGINT)
            if callable(handler):  # otherwise SIGINT runs no Python code
                self._handler = handler
                self.hold()

    def hold(self) -> None:
        """Delays interrupts again, after `allow`."""
        if self._handler is not None:
            _set(_SIGINT, self._note)

    def allow(self) -> None:
        """Lets interrupts pass until `hold`, while user code runs."""
        if self._handler is not None:
            _set(_SIGINT, self._handler)

    end = allow

    def note(self, error: BaseException) -> None:
        """Sets `noted` if user code raised a KeyboardInterrupt on the main thread."""
        if self._handler is not None and isinstance(error, KeyboardInterrupt):
            self.noted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
