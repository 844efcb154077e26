"""The request to stop: a cell that the loops of this process read, its reason, and who asked. Signals: `signals`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hostcallback.receiver import processes
from hostcallback.receiver.failures.check_report import FailedCheck
from hostcallback.receiver.failures.deferred_errors import watch_stops
from hostcallback.receiver.runtime.cells import CellSpec, cell_of, cells
from hostcallback.receiver.text import say

SPEC = CellSpec.of("request to stop", np.asarray(False))
"""The cell that is true from the request on."""

BEGUN = CellSpec.of("loops begun", np.asarray(False))
"""A cell that each loop that can be stopped reads where it begins. Its value means nothing, its reads are counted."""

ENDED = CellSpec.of("loops ended", np.asarray(False))
"""The same where it ends."""

MAX_CHARS = 500


class StopRequest:
    """The request of this process. Any thread.

    Attributes:
        tell: called with the reason of a request that is made in this process, to tell the other processes.
    """

    def __init__(self) -> None:
        """There is none."""
        self._lock = threading.RLock()  # protects all below, and the cell; signal handlers make requests
        self._reason: str | None = None
        self._has_told = False
        self._failed_loops = 0  # that have begun, and ended with an error
        self.tell: Callable[[str], None] = lambda reason: None

    @property
    def reason(self) -> str | None:
        """Why the loops stop; None without a request."""
        return self._reason

    def make(self, reason: str, *, tells: bool = True) -> None:
        """Requests a stop, and says so on the standard error output, once.

        Args:
            reason: a text for people.
            tells: whether other processes of the program are told.
        """
        with self._lock:
            is_first = self._reason is None
            if is_first:
                self._reason = reason = reason[:MAX_CHARS]
                cell_of(SPEC).set(np.asarray(True))
            # Also if another process has asked before: that one may take its request back.
            tells = tells and not self._has_told
            self._has_told |= tells
        if is_first:
            say(
                f"hostcallback: stop requested ({reason}): loops that can be stopped end after the iteration that runs"
            )
        if tells:
            self.tell(reason)

    def clear(self) -> None:
        """Takes the request back: later loops run."""
        with self._lock:
            self._reason, self._has_told = None, False
            cell_of(SPEC).set(np.asarray(False))

    def is_awaited(self) -> bool:
        """Whether a loop runs that can be stopped."""
        return _reads(BEGUN) - _reads(ENDED) > self._failed_loops

    def unheard(self) -> str:
        """Says that no loop would end by a request that is made now; empty if one may."""
        if self._reason is None and SPEC.name not in cells:
            return "no program with a loop with stop=True, or with hcb.stop_requested, was traced yet"
        if _reads(BEGUN) and not self.is_awaited():
            return "no loop with stop=True runs now; those that begin later end before their first iteration"
        return ""

    def loops_begun(self) -> int:
        """How many loops that can be stopped have begun so far."""
        return _reads(BEGUN)

    def note_ended(self, begun: int) -> None:
        """Notes that as many loops as had begun have ended, so that those without an end have failed."""
        self._failed_loops = max(0, begun - _reads(ENDED))

    def after_fork_in_child(self) -> None:
        """Renews the lock, which a thread may hold that does not exist in the child."""
        self._lock = threading.RLock()


def _reads(spec: CellSpec) -> int:
    return known.state()[1] if (known := cells.get(spec.name)) is not None else 0


stop_request = StopRequest()
"""Of this process."""

processes.in_child(processes.Stage.RUNTIME, stop_request.after_fork_in_child)


def _stop_at(check: FailedCheck) -> None:
    stop_request.make(f"check failed: {check.explanation.text}, at {check.source_line}")


watch_stops(_stop_at)
