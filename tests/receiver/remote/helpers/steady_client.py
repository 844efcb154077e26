"""A well-behaved client that sends all the time, while other clients misbehave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from collecting import Emitter
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.grpc_transport import GrpcStream, GrpcTransport
from hostcallback.receiver.remote.sending.sender import OnAck

PAUSE_SEC = 0.01


class SteadyClient:
    """Sends from the beginning of its `with` block to the end, by one connection, or the end raises.

    Attributes:
        sent: how many messages.
    """

    def __init__(self, address: str, spool: Path, **options: Any) -> None:
        self.sent = 0
        self._transport = _CountingTransport(
            Forward(address, spool=spool, run="steady", drain_sec=60, **options)
        )
        self._forwarder = Forwarder(
            self._transport.options, transport=self._transport, local_devices={"cpu:0": 0}
        )
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._emit)

    def _emit(self) -> None:
        emitter = Emitter(self._forwarder)
        while not self._end.wait(PAUSE_SEC):
            emitter.losses(5)
            self.sent = emitter.seq

    def __enter__(self) -> SteadyClient:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._forwarder.close()
        assert not self._forwarder.unsent_bytes
        assert self._transport.connections == 1


class _CountingTransport(GrpcTransport):
    def __init__(self, options: Forward) -> None:
        super().__init__(options)
        self.options = options
        self.connections = 0

    def connect(self, key: StreamKey, on_ack: OnAck) -> GrpcStream:
        self.connections += 1
        return super().connect(key, on_ack)
