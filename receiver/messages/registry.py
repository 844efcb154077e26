"""Maps consumer ids to consumers, as long as a compiled program can emit to them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from hostcallback.receiver.messages.message import Consumer

Find = Callable[[int], Consumer | None]
"""Returns the consumer with an id, if it is registered."""

RETIRED_KEPT = 1024
RETIRED_SEC = 60.0
"""Minimum seconds for which a consumer stays registered after its programs are gone, and the number of consumers that
stay longer. A program that was dropped may still run, and its messages may be queued: they must find their consumer. A
barrier proves that there are none left, and forgets the consumers at once."""


class Lease:
    """Keeps one consumer registered. Each program that emits to the consumer holds a lease."""

    __slots__ = ("__weakref__", "consumer")

    def __init__(self, consumer: Consumer) -> None:
        """Called by `Registry.lease`."""
        self.consumer = consumer


class Registry:
    """Maps consumer ids to consumers. Any thread; `find` takes no lock."""

    def __init__(self) -> None:
        """The registry is empty."""
        self._lock = threading.RLock()  # protects _leases and _retired
        self._consumers: dict[int, Consumer] = {}
        self._leases: dict[int, int] = {}
        self._retired: deque[tuple[int, float]] = deque()
        # Finalizers run inside the garbage collector, on any thread, perhaps while this thread holds the lock: they
        # only append here, and the next thread that takes the lock does their work.
        self._ended: deque[int] = deque()
        self._watchers: list[Callable[[Consumer], None]] = []

    def find(self, consumer_id: int) -> Consumer | None:
        """The consumer of an id; None if it is not registered."""
        return self._consumers.get(consumer_id)

    def lease(self, consumer: Consumer) -> Lease:
        """Registers the consumer until the returned lease, and every other lease of its id, is gone.

        If the id is registered, the existing consumer and its sink state are kept, because equal ids mean equal taps.
        """
        with self._lock:
            self._settle()
            lease = Lease(self._consumers.setdefault(consumer.consumer_id, consumer))
            self._leases[consumer.consumer_id] = self._leases.get(consumer.consumer_id, 0) + 1
            # Called without the lock: watchers take locks of their own, whose holders may look up consumers.
            watchers = list(self._watchers) if lease.consumer is consumer else []
        for watcher in watchers:
            watcher(consumer)
        weakref.finalize(lease, self._ended.append, consumer.consumer_id).atexit = False
        return lease

    def watch(self, watcher: Callable[[Consumer], None]) -> None:
        """Calls `watcher`, which must not raise, with every registered consumer, and with each later one."""
        with self._lock:
            self._watchers.append(watcher)
            known = list(self._consumers.values())
        for consumer in known:
            watcher(consumer)

    def unwatch(self, watcher: Callable[[Consumer], None]) -> None:
        """Ends the calls to `watcher`, if there are any."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def consumers(self) -> list[Consumer]:
        """The registered consumers."""
        with self._lock:
            return list(self._consumers.values())

    def retired(self) -> list[tuple[int, float]]:
        """Consumers whose programs are gone, with the time of that: a barrier may forget them when it has finished."""
        with self._lock:
            self._settle()
            return list(self._retired)

    def forget(self, retired: Iterable[tuple[int, float]]) -> None:
        """Forgets consumers of an earlier `retired`, for which no message can come any more."""
        gone = set(retired)
        with self._lock:
            self._retired = deque(entry for entry in self._retired if entry not in gone)
            again = {consumer_id for consumer_id, _ in self._retired}  # leased and retired again meanwhile
            for consumer_id in {consumer_id for consumer_id, _ in gone} - again:
                self._forget(consumer_id)

    def __len__(self) -> int:
        """Number of registered consumers, retired ones included."""
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
        if consumer_id not in self._leases:  # otherwise it was leased again meanwhile
            self._consumers.pop(consumer_id, None)
