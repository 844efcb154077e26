"""Errors of the thread that takes a collector's acknowledgements over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc", reason="needs grpcio")

from hostcallback.receiver.errors import TransportError
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.sending.grpc_transport import GrpcStream


class _Call:
    """A call of a collector that acknowledges 8 bytes once `acknowledges` is set, and then stays open."""

    def __init__(self) -> None:
        self.acknowledges = threading.Event()
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        yield forwarding_protocol.encode_position(StreamOffset(0, 0))
        self.acknowledges.wait(30)
        yield forwarding_protocol.encode_position(StreamOffset(0, 8))
        self._ended.wait(30)

    def cancel(self) -> None:
        self._ended.set()


def test_a_spool_that_cannot_be_shortened_breaks_the_connection_so_that_the_sender_tries_again() -> None:
    call = _Call()

    def fail(position: StreamOffset) -> None:
        raise PermissionError(13, "Permission denied", "000001.hcblog")

    transport: Any = SimpleNamespace(address="host:7070", call=lambda method, messages: call)
    stream = GrpcStream(transport, StreamKey("run", 0, "0" * 16), fail)
    try:
        stream.check()
        call.acknowledges.set()
        stream._thread.join(10)
        assert not stream._thread.is_alive()
        with pytest.raises(
            TransportError, match=r"host:7070 has stored cannot be removed.*Permission denied"
        ):
            stream.check()
    finally:
        stream.close()
