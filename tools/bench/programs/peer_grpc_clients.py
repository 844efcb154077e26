"""Bare gRPC streams, each on a separate channel, whose messages are answered: the peer of `many_clients.py`."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque

import grpc

from hostcallback.receiver.remote.sending.grpc_transport import CHANNEL_OPTIONS

WAIT_SEC = 60.0


class BareClient:
    """One stream.

    Attributes:
        seconds: time until each answer.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        """Sends messages of the given number of bytes."""
        self.seconds: list[float] = []
        self._message = bytes(nbytes)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._answers = self._channel.stream_stream("/bare.Bare/Echo")(iter(self._requests.get, None))
        self._changed = threading.Condition()  # protects the fields below
        self._sent: deque[float] = deque()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self) -> None:
        """Sends one message."""
        with self._changed:
            self._sent.append(time.perf_counter())
        self._requests.put(self._message)

    def drain(self) -> None:
        """Until all is answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._sent, WAIT_SEC)

    def end(self) -> None:
        """Ends the stream."""
        self._requests.put(None)
        self._thread.join(WAIT_SEC)
        self._channel.close()

    def _receive(self) -> None:
        for _ in self._answers:
            with self._changed:
                self.seconds.append(time.perf_counter() - self._sent.popleft())
                self._changed.notify_all()
