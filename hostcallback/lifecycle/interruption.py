"""What Ctrl-C means for messages that wait for their taps: less than a second of time, and one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

from hostcallback.receiver.runtime.runtime import runtime

GRACE_SEC = 0.8
"""Seconds for which an interrupted program waits for its taps, its recorders and its collector."""

_MARK = "hostcallback: interrupted: "


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception stems from Ctrl-C.

    On the callback transport JAX makes a JaxRuntimeError of an interrupt that arrives in a Python callback.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
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
                print(text, file=sys.stderr, flush=True)
            except KeyboardInterrupt:  # the other one
                self.end()

    def note_backlog(self) -> None:
        """Sets `backlog`."""
        self.backlog = runtime.describe_backlog()

    def end(self) -> None:
        """Ends the wait: it was interrupted, too."""
        self.deadline = perf_counter()


def add_line(error: BaseException, found: Sequence[str]) -> None:
    """Adds a line to the traceback, as its last one, that says what was lost or is still queued."""
    if found:
        error.add_note(f"{_MARK}{'; '.join(' '.join(text.split()) for text in found)}")


def has_line(error: BaseException | None) -> bool:
    """Whether a receiver has added such a line."""
    return any(note.startswith(_MARK) for note in getattr(error, "__notes__", ()))
