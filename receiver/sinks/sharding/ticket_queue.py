"""Turns: lets threads go on one at a time, in the order in which they took their tickets."""

from __future__ import annotations

import threading
from collections import deque


class TicketQueue:
    """A queue of tickets. Any thread.

    Whoever takes a ticket must `leave` with it, whatever happens meanwhile: everybody behind it waits for that.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        self.reset()

    def reset(self) -> None:
        """Forgets everybody: for a forked child, whose parent's threads do not exist."""
        self._lock = threading.Lock()  # protects _tickets
        self._changed = threading.Condition(self._lock)
        self._tickets: deque[object] = deque()

    def __len__(self) -> int:
        """How many tickets are out, that of the one whose turn it is among them."""
        return len(self._tickets)

    def issue(self) -> object:
        """A ticket behind all others."""
        ticket = object()
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: object) -> None:
        """Waits until all tickets before this one are gone."""
        tickets = self._tickets
        if tickets[0] is not ticket:
            with self._changed:
                self._changed.wait_for(lambda: tickets[0] is ticket)

    def release(self, ticket: object) -> None:
        """Gives a ticket back, after its turn or instead of it."""
        with self._lock:
            if ticket in self._tickets:  # not if the process was forked meanwhile
                self._tickets.remove(ticket)
            if self._tickets:
                self._changed.notify_all()
