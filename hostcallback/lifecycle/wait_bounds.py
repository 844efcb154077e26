"""How long a process waits for its taps after Ctrl-C, and at its end while they make progress; what it says then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.runtime.signals import is_interactive, watch_termination
from hostcallback.receiver.text import say

if TYPE_CHECKING:
    from hostcallback.receiver.sinks.metric_writers.sink import MetricsSink

GRACE_SEC = 0.8
"""Seconds for which an interrupted program waits for its taps, its recorders and its collector."""

EXIT_STALL_SEC = 10.0
"""Seconds without a delivery at interpreter exit, such as by one tap that does not return, after which the remaining
messages count as lost."""

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
    """The wait of an interrupted program for its taps. Says at its start what another interrupt ends.

    Attributes:
        deadline: `perf_counter()` value at which it ends.
        backlog: the messages that wait; empty if none do.
    """

    def __init__(self, seconds: float = GRACE_SEC) -> None:
        """Begins to wait, for `seconds` at most."""
        self.deadline = perf_counter() + seconds
        self.note_backlog()
        goes_on = is_interactive()
        then = "another interrupt ends the wait" if goes_on else "another Ctrl-C ends the program at once"
        text = f"{_MARK}waiting at most {seconds:g} s for {self.backlog}; {then}"
        if self.backlog:
            try:
                say(text)
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
    say(f"{_MARK}{'; '.join(' '.join(text.split()) for text in found)}")


def has_told_loss(error: BaseException | None) -> bool:
    """Whether such a line was printed for this exception."""
    return error is not None and _TOLD in error.__dict__


TELL_SEC = 3.0
"""Seconds of waiting after which one line says how many messages are left."""


class ExitWait:
    """Watches the progress while a process waits for its taps at exit. One thread.

    Attributes:
        idle_sec: seconds without a delivery after which the wait ends.
    """

    def __init__(self, idle_sec: float) -> None:
        """Begins now."""
        self.idle_sec = idle_sec
        self._begun = self._since = perf_counter()
        self._seen = _progress()
        self._told = False

    def look(self) -> None:
        """Waits as long as any device makes progress. Prints one line after `TELL_SEC`.

        Raises:
            TapTimeoutError: nothing was delivered for `idle_sec`.
        """
        now, seen = perf_counter(), _progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self.idle_sec:
            raise TapTimeoutError(runtime.describe_wait() or describe_backlog() or _NO_END)
        if not self._told and now - self._begun > TELL_SEC:
            self._told = True
            waits_for = describe_backlog() or "computations that still run"
            say(f"hostcallback: the program has ended and waits for {waits_for}; Ctrl-C ends it without them")


def describe_backlog() -> str:
    """Says how many messages wait for which function, and how many records for which metric writer; may be empty."""
    return "; ".join(filter(None, [runtime.describe_backlog(), *_records()]))


def flush_writers(look: Callable[[], None]) -> None:
    """Flushes the metric writers of open receivers, and logs what blocked writers lose.

    Args:
        look: called repeatedly while waiting; may raise to stop the wait.
    """
    for scope in runtime.current_scopes():
        if scope.metrics is not None:
            scope.metrics.flush(look=look)
    for lost in _records():
        logger.error("%s were lost at exit", lost)


def _progress() -> tuple[Any, ...]:
    return (*runtime.progress(), *_records())


def _records() -> list[str]:
    return [text for sink in _metrics() for text in sink.backlog()]


def _behind() -> list[str]:
    return [text for sink in _metrics() for text in sink.behind()]


def _metrics() -> list[MetricsSink]:
    return [scope.metrics for scope in runtime.current_scopes() if scope.metrics is not None]


watch_termination.unwritten = _behind


_NO_END = (
    "dispatched computations were still running when the time was up: wait for their results before the program ends, "
    "or look for a computation that does not end"
)
