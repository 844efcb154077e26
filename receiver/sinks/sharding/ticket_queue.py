"""A ticket lock: threads go on one at a time, in the order in which they took their tickets."""

from __future__ import annotations

import threading
from collections import deque


class TicketQueue:
    """A queue of tickets. Any thread.

    A thread that takes a ticket must `release` it, also after an error, because all later tickets wait for that.
    """

    def __init__(self) -> None:
        """Starts without tickets."""
        self.reset()

    def reset(self) -> None:
        """Drops all tickets, for a forked child, which does not have the parent's threads."""
        self._lock = threading.Lock()  # protects _tickets
        self._changed = threading.Condition(self._lock)
        self._tickets: deque[object] = deque()

    def __len__(self) -> int:
        """Returns the number of tickets that are not released, including the one whose turn it is."""
        return len(self._tickets)

    def issue(self) -> object:
        """Returns a ticket after all others."""
        ticket = object()
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: object) -> None:
        """Waits until all tickets before this one are released."""
        tickets = self._tickets
        if tickets[0] is not ticket:
            with self._changed:
                self._changed.wait_for(lambda: tickets[0] is ticket)

    def release(self, ticket: object) -> None:
        """Releases a ticket, after its turn or instead of it."""
        with self._lock:
            if ticket in self._tickets:  # a forked child may have dropped it
                self._tickets.remove(ticket)
            if self._tickets:
                self._changed.notify_all()
