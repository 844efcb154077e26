"""Which consumer each consumer id stands for, for as long as a compiled program can emit to it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable

from receiver.consumer import Consumer

RETIRED_KEPT = 1024
"""How many consumers whose programs are gone stay known. A program that was dropped may still be running:
its messages must find their consumer. A barrier proves that none runs and forgets them all; without one, the
oldest beyond this many are forgotten (far more than the computations a device queues)."""


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
        self._lock = threading.Lock()  # protects _leases and _retired
        self._consumers: dict[int, Consumer] = {}
        self._leases: dict[int, int] = {}
        self._retired: deque[int] = deque()
        # Finalizers run inside the garbage collector, on any thread and perhaps while this thread holds
        # the lock: they only append here, and whoever takes the lock next does their work.
        self._ended: deque[int] = deque()

    def find(self, consumer_id: int) -> Consumer | None:
        """The consumer of that id, or None."""
        return self._consumers.get(consumer_id)

    def lease(self, consumer: Consumer) -> Lease:
        """Makes the consumer known until the returned lease, and every other lease of its id, is gone."""
        lease = Lease(consumer)
        with self._lock:
            self._settle()
            self._consumers[consumer.consumer_id] = consumer
            self._leases[consumer.consumer_id] = self._leases.get(consumer.consumer_id, 0) + 1
        weakref.finalize(lease, self._ended.append, consumer.consumer_id).atexit = False
        return lease

    def retired(self) -> list[int]:
        """The ids of consumers whose programs are gone by now: what a barrier may forget when it is through."""
        with self._lock:
            self._settle()
            return list(self._retired)

    def forget(self, consumer_ids: Iterable[int]) -> None:
        """Forgets retired consumers, for whom no message can come any more."""
        with self._lock:
            for consumer_id in consumer_ids:
                with contextlib.suppress(ValueError):  # forgotten by somebody else
                    self._retired.remove(consumer_id)
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
                self._retired.append(consumer_id)
        while len(self._retired) > RETIRED_KEPT:
            self._forget(self._retired.popleft())

    def _forget(self, consumer_id: int) -> None:
        if consumer_id not in self._leases:  # leased anew meanwhile
            self._consumers.pop(consumer_id, None)
