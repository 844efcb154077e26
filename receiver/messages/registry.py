"""Which consumer each consumer id stands for, for as long as a compiled program can emit to it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from receiver.messages.message import Consumer

RETIRED_KEPT = 1024
RETIRED_SEC = 60.0
"""For how long at least consumers whose programs are gone stay known, and how many stay known for longer. A program
that was dropped may still be running, and its messages queue: they must find their consumer. A barrier proves that
there are none and forgets at once."""


class Lease:
    """Keeps one registered consumer known. Whoever holds a program that emits to it holds one."""

    __slots__ = ("__weakref__", "consumer")

    def __init__(self, consumer: Consumer) -> None:
        """Leases are made by `Registry.lease`."""
        self.consumer = consumer


class Registry:
    """Consumer ids to consumers. Safe from any thread; `find` takes no lock."""

    def __init__(self) -> None:
        """An empty registry."""
        self._lock = threading.RLock()  # protects _leases and _retired
        self._consumers: dict[int, Consumer] = {}
        self._leases: dict[int, int] = {}
        self._retired: deque[tuple[int, float]] = deque()
        # Finalizers run inside the garbage collector, on any thread and perhaps while this thread holds
        # the lock: they only append here, and whoever takes the lock next does their work.
        self._ended: deque[int] = deque()
        self._watchers: list[Callable[[Consumer], None]] = []

    def find(self, consumer_id: int) -> Consumer | None:
        """The consumer of that id, or None."""
        return self._consumers.get(consumer_id)

    def lease(self, consumer: Consumer) -> Lease:
        """Makes the consumer known until the returned lease, and every other lease of its id, is gone.

        One that is known by that id stays, with what its sink has gathered: equal ids are equal taps.
        """
        with self._lock:
            self._settle()
            lease = Lease(self._consumers.setdefault(consumer.consumer_id, consumer))
            self._leases[consumer.consumer_id] = self._leases.get(consumer.consumer_id, 0) + 1
            watchers = list(self._watchers) if lease.consumer is consumer else []
        for watcher in watchers:
            watcher(consumer)
        weakref.finalize(lease, self._ended.append, consumer.consumer_id).atexit = False
        return lease

    def watch(self, watcher: Callable[[Consumer], None]) -> None:
        """Calls `watcher`, which must not raise, with every consumer that is known, and with each that will be."""
        with self._lock:
            self._watchers.append(watcher)
            known = list(self._consumers.values())
        for consumer in known:
            watcher(consumer)

    def unwatch(self, watcher: Callable[[Consumer], None]) -> None:
        """Ends what `watch` began, if it did."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def consumers(self) -> list[Consumer]:
        """Those that are known now."""
        with self._lock:
            return list(self._consumers.values())

    def retired(self) -> list[tuple[int, float]]:
        """The consumers whose programs are gone by now: what a barrier may forget when it is through."""
        with self._lock:
            self._settle()
            return list(self._retired)

    def forget(self, retired: Iterable[tuple[int, float]]) -> None:
        """Forgets consumers that `retired` listed, for whom no message can come any more."""
        gone = set(retired)
        with self._lock:
            self._retired = deque(entry for entry in self._retired if entry not in gone)
            again = {consumer_id for consumer_id, _ in self._retired}  # retired once more meanwhile
            for consumer_id in {consumer_id for consumer_id, _ in gone} - again:
                self._forget(consumer_id)

    def __len__(self) -> int:
        """How many consumers are known, retired ones included."""
        return len(self._consumers)

    def _settle(self) -> None:
        while self._ended:
            consumer_id = self._ended.popleft()
            left = self._leases[consumer_id] - 1
            if left:
                self._leases[consumer_id] = left
            else:
                del self._leases[consumer_id]
                self._retired.append((consumer_id, monotonic()))
        while len(self._retired) > RETIRED_KEPT and monotonic() - self._retired[0][1] > RETIRED_SEC:
            self._forget(self._retired.popleft()[0])

    def _forget(self, consumer_id: int) -> None:
        if consumer_id not in self._leases:  # leased anew meanwhile
            self._consumers.pop(consumer_id, None)
