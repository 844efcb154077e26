"""What Ctrl-C means for messages that wait for their taps: less than a second of time, and one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from hostcallback.receiver.runtime.runtime import runtime

GRACE_SEC = 0.8
"""Seconds for which an interrupted program waits for its taps, its recorders and its collector."""

_MARK = "hostcallback: interrupted: "
_TOLD = "_hostcallback_told_loss"


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception stems from Ctrl-C.

    On the callback transport JAX makes a JaxRuntimeError of an interrupt that arrives in a Python callback.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    # By name and text: a Python callback's KeyboardInterrupt comes back from XLA as a JaxRuntimeError with
    # the traceback.
    return type(error).__name__ == "JaxRuntimeError" and "KeyboardInterrupt" in str(error)


class InterruptedWait:
    """The wait of an interrupted program for its taps. Says at its start that another Ctrl-C ends it.

    Attributes:
        deadline: `perf_counter()` value at which it ends.
        backlog: the messages that wait; empty if none do.
    """

    def __init__(self, seconds: float = GRACE_SEC) -> None:
        """Begins to wait, for `seconds` at most."""
        self.deadline = perf_counter() + seconds
        self.note_backlog()
        text = f"{_MARK}waiting at most {seconds:g} s for {self.backlog}; another Ctrl-C ends the program at once"
        if self.backlog:
            try:
                with suppress(OSError, ValueError):  # the standard error output is closed
                    print(text, file=sys.stderr, flush=True)
            except KeyboardInterrupt:  # the other one
                self.end()

    def note_backlog(self) -> None:
        """Sets `backlog`."""
        self.backlog = runtime.describe_backlog()

    def end(self) -> None:
        """Ends the wait: it was interrupted, too."""
        self.deadline = perf_counter()


def tell_loss(error: BaseException, found: Sequence[str]) -> None:
    """Prints one line on what was lost or is still queued, before the traceback of the interrupt."""
    if not found:
        return
    error.__dict__[_TOLD] = True
    with suppress(OSError, ValueError):  # the standard error output is closed
        print(f"{_MARK}{'; '.join(' '.join(text.split()) for text in found)}", file=sys.stderr, flush=True)


def has_told_loss(error: BaseException | None) -> bool:
    """Whether such a line was printed for this exception."""
    return error is not None and _TOLD in error.__dict__
