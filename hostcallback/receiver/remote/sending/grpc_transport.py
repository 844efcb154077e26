"""The gRPC transport to a collector; its connection errors are explained: the likely cause, and the cure."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from hostcallback.receiver.errors import BadStreamError, StreamRefusedError, TransportError
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.credentials import read_tls_files
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.sender import OnAck
from hostcallback.receiver.text import foreign

_NOBODY = (
    "connection refused at {}: no collector is listening. Start `hcb collect` there or correct the address"
)
_NO_HOST = "this machine cannot resolve the host name in {}: correct the address"
_SILENT = "the program that listens at {} does not answer: is it a collector, and not stopped?"
_NO_COLLECTOR = (
    "the program that listens at {} is not a collector, or one with TLS: correct the address, or give tls_ca"
)
_NO_COLLECTOR_WITH_TLS = "the program that listens at {} is not a collector: correct the address"
_NO_TLS = (
    "the program that listens at {} does not use TLS: leave out tls_ca, or give the collector --tls-cert and "
    "--tls-key"
)
_BAD_CERTIFICATE = (
    "the certificate of the server at {} is invalid: it must be valid now, signed by a certificate in tls_ca, and "
    "issued for the host in the address"
)
_HUNG_UP = "the program that listens at {} closed the connection: it may require TLS (give tls_ca)"
_HUNG_UP_WITH_TLS = (
    "the program that listens at {} closed the connection: does it require a client certificate (tls_cert, tls_key) "
    "that is valid and signed by its --tls-ca?"
)
_BAD_FILES = "tls_ca, tls_cert or tls_key cannot be used: expected PEM files, and the key of that certificate"

_CAUSES = (
    ("Connection refused", _NOBODY, _NOBODY),
    ("Domain name not found", _NO_HOST, _NO_HOST),
    ("DNS resolution failed", _NO_HOST, _NO_HOST),
    ("errors resolving", _NO_HOST, _NO_HOST),
    ("before receiving SETTINGS", _SILENT, _SILENT),
    ("Expected SETTINGS frame", _NO_COLLECTOR, _NO_COLLECTOR_WITH_TLS),
    ("Failed parsing HTTP/2", _NO_COLLECTOR, _NO_COLLECTOR_WITH_TLS),
    ("Method not found", _NO_COLLECTOR, _NO_COLLECTOR_WITH_TLS),
    ("WRONG_VERSION_NUMBER", _NO_TLS, _NO_TLS),
    ("CERTIFICATE_VERIFY_FAILED", _BAD_CERTIFICATE, _BAD_CERTIFICATE),
    ("Hostname Verification", _BAD_CERTIFICATE, _BAD_CERTIFICATE),
    ("create security handshaker", _BAD_FILES, _BAD_FILES),
    ("Socket closed", _HUNG_UP, _HUNG_UP_WITH_TLS),
    ("Connection reset", _HUNG_UP, _HUNG_UP_WITH_TLS),
)
"""Parts of gRPC's error texts, and cause and cure, without TLS and with it; the first that matches counts."""


def _explained(details: str, address: str, *, tls: bool) -> str:
    # Cause and cure before gRPC's own text; only that text if the error is unknown.
    for text, plain, secure in _CAUSES:
        if text in details and text != details:  # the text alone means that an established connection broke
            # A host with several addresses may refuse the last one, and a program answers at another.
            if plain is _NOBODY and _listens(address):
                plain, secure = _NO_COLLECTOR, _NO_COLLECTOR_WITH_TLS
            return f"{(secure if tls else plain).format(address)} ({details})"
    return details


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        # At most 1 s: this runs in the sender's thread, for a text.
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


CONNECT_SEC = 10.0

REFUSALS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Status codes after which a retry would get the same answer."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A connection that a router has forgotten, or whose machine is gone, breaks within 30 s instead of many minutes.
    # The collector allows a ping each 10 s (`SERVER_OPTIONS` of `collector/service.py`), so it refuses none.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without limit: by default gRPC stops after two pings without data, and a quiet tap sends none for hours.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", forwarding_protocol.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", forwarding_protocol.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC uses this as the time in which a connection must be established, despite its name.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The sender retries, from the position that the collector has stored. gRPC would only repeat the start of a stream,
    # and keep what was sent for that.
    ("grpc.enable_retries", 0),
)


def _make_channel(options: Forward) -> Any:
    if options.tls_ca is None:
        return grpc.insecure_channel(options.address, options=CHANNEL_OPTIONS)
    root, chain, key = read_tls_files(options.tls_ca, options.tls_cert, options.tls_key)
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    return grpc.secure_channel(options.address, credentials, options=CHANNEL_OPTIONS)


class GrpcTransport:
    """A channel to one collector. See `hostcallback.receiver.remote.sending.sender.Transport`.

    Attributes:
        address: of the collector.
    """

    def __init__(self, options: Forward) -> None:
        """The channel connects with the first call.

        Raises:
            RemoteError: a file is not a certificate or a key.
            OSError: a file cannot be read.
        """
        self.address = options.address
        self._tls = options.tls_ca is not None
        self._metadata = (("authorization", f"Bearer {options.token}"),) if options.token else ()
        self._channel = _make_channel(options)

    def connect(self, key: StreamKey, on_ack: OnAck) -> GrpcStream:
        """Starts to send a stream, or continues it."""
        return GrpcStream(self, key, on_ack)

    def call(self, method: str, messages: Iterator[bytes]) -> Any:
        """Starts a call that sends `messages` until they end; iterating over it yields the collector's."""
        return self._channel.stream_stream(f"/{forwarding_protocol.SERVICE}/{method}")(
            messages, metadata=self._metadata
        )

    def translated(self, error: Any, *, unimplemented: str = "") -> TransportError:
        """Translates the error of a call; `unimplemented` explains that the collector {} does not have its method."""
        code = error.code()
        if unimplemented and code is grpc.StatusCode.UNIMPLEMENTED:
            return StreamRefusedError(unimplemented.format(self.address))
        said = _explained(foreign(error.details()) or "no reason given", self.address, tls=self._tls)
        text = f"{said} ({self.address}, {code.name})"
        return StreamRefusedError(text) if code in REFUSALS else TransportError(text)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


class GrpcStream:
    """One stream that is being sent. See `hostcallback.receiver.remote.sending.sender.TransportStream`."""

    def __init__(self, transport: GrpcTransport, key: StreamKey, on_ack: OnAck) -> None:
        """Connects, and waits for the collector's position in the stream.

        Raises:
            StreamRefusedError: the collector refuses the stream.
            TransportError: the collector cannot be reached.
        """
        self._transport = transport
        self._address = transport.address
        self._on_ack = on_ack
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(forwarding_protocol.encode_hello(key))
        self._sent: StreamOffset | None = None
        # Neither `_error` nor `stored` needs a lock. The thread of acknowledgements writes them, the sender's reads
        # them. `stored` is written before `_opened` is set, for which the constructor waits. `_error` is set once: if
        # the sender sees it late, it loses some slices, which it sends again over the next connection.
        self._error: TransportError | None = None
        self._opened = threading.Event()
        self.stored = StreamOffset(0, 0)
        self._call = transport.call(forwarding_protocol.FORWARD, iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._receive, name="hostcallback-acks", daemon=True)
        self._thread.start()
        # The call's own deadline would also end a connected stream, which lives as long as the process.
        if not self._opened.wait(CONNECT_SEC):
            self.close()
            raise TransportError(f"the collector at {self._address} did not answer in {CONNECT_SEC:g} s")
        self.check()

    def send(self, piece: SegmentSlice) -> None:
        """Sends one slice."""
        self.check()
        # Consecutive slices need no position: the collector continues where the last one ended.
        if piece.position != self._sent:
            self._requests.put(forwarding_protocol.encode_place(piece.position))
        for message in forwarding_protocol.encode_bytes(piece.data):
            self._requests.put(message)
        self._sent = piece.end

    def check(self) -> None:
        """Raises TransportError if the connection is broken."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the call."""
        self._requests.put(None)  # ends gRPC's thread that takes requests, which `cancel` does not wake
        self._call.cancel()

    def _receive(self) -> None:
        try:
            responses: Iterator[bytes] = iter(self._call)
            first = next(responses, None)
            if first is not None:
                self.stored = forwarding_protocol.decode_position(first)
                self._opened.set()
            for response in responses:
                self._on_ack(forwarding_protocol.decode_position(response))
            self._error = TransportError(f"the collector at {self._address} ended the stream")
        except StreamRefusedError as error:  # what the sender says of an acknowledgement
            self._error = error
        except grpc.RpcError as error:
            self._error = self._transport.translated(error)
        except OSError as error:
            # Of the spool. Without this the sender would wait for acknowledgements that no thread takes any more.
            self._error = TransportError(
                f"what {self._address} has stored cannot be removed from the spool: {error}"
            )
        except BadStreamError as error:
            self._error = StreamRefusedError(f"the program at {self._address} is not a collector: {error}")
        finally:
            self._opened.set()
