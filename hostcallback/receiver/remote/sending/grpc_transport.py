"""The gRPC transport to a collector; its connection errors are explained: the likely cause, and the cure."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from hostcallback.receiver.remote import protocol
from hostcallback.receiver.remote.credentials import (
    BadStreamError,
    StreamRefusedError,
    TransportError,
    check_tls_files,
)
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.transport import OnAck
from hostcallback.receiver.remote.streams import SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.text import foreign

_Says = Callable[[str, bool], str]
"""Returns an explanation for an address; the flag tells whether TLS is used."""


def _nobody(address: str, tls: bool) -> str:
    if _listens(address):  # the error is of the last address of a host that has several: another one answers
        return _no_collector(address, tls)
    return (
        f"connection refused at {address}: no collector is listening. Start `hcb collect` there or correct the "
        "address"
    )


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        # At most 1 s: this runs in the sender's thread, for a text.
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def _no_host(address: str, tls: bool) -> str:
    return f"this machine cannot resolve the host name in {address}: correct the address"


def _silent(address: str, tls: bool) -> str:
    return f"the program that listens at {address} does not answer: is it a collector, and not stopped?"


def _no_collector(address: str, tls: bool) -> str:
    if tls:
        return f"the program that listens at {address} is not a collector: correct the address"
    return (
        f"the program that listens at {address} is not a collector, or one with TLS: correct the address, or give "
        "tls_ca"
    )


def _no_tls(address: str, tls: bool) -> str:
    return (
        f"the program that listens at {address} does not use TLS: leave out tls_ca, or give the collector --tls-cert "
        "and --tls-key"
    )


def _bad_certificate(address: str, tls: bool) -> str:
    return (
        f"the certificate of the server at {address} is invalid: it must be valid now, signed by a certificate in "
        "tls_ca, and issued for the host in the address"
    )


def _hung_up(address: str, tls: bool) -> str:
    if tls:
        return (
            f"the program that listens at {address} closed the connection: does it require a client certificate "
            "(tls_cert, tls_key) that is valid and signed by its --tls-ca?"
        )
    return f"the program that listens at {address} closed the connection: it may require TLS (give tls_ca)"


def _bad_files(address: str, tls: bool) -> str:
    return "tls_ca, tls_cert or tls_key cannot be used: expected PEM files, and the key of that certificate"


_KNOWN: tuple[tuple[str, _Says], ...] = (
    ("Connection refused", _nobody),
    ("Domain name not found", _no_host),
    ("DNS resolution failed", _no_host),
    ("errors resolving", _no_host),
    ("before receiving SETTINGS", _silent),
    ("Expected SETTINGS frame", _no_collector),
    ("Failed parsing HTTP/2", _no_collector),
    ("Method not found", _no_collector),
    ("WRONG_VERSION_NUMBER", _no_tls),
    ("CERTIFICATE_VERIFY_FAILED", _bad_certificate),
    ("Hostname Verification", _bad_certificate),
    ("create security handshaker", _bad_files),
    ("Socket closed", _hung_up),
    ("Connection reset", _hung_up),
)
"""Parts of gRPC's error texts; the first that matches counts."""


def no_control(address: str) -> str:
    """Explains that a collector does not implement live control."""
    return (
        f"the collector at {address} does not relay control requests: it was started with --no-control, or is of an "
        "older version"
    )


def explain_grpc_error(details: str, address: str, *, tls: bool) -> str:
    """Returns cause and cure before gRPC's own text; only that text if the error is unknown.

    Args:
        details: gRPC's text.
        address: the collector's.
        tls: whether TLS was used.
    """
    for text, says in _KNOWN:
        if text in details and text != details:  # the text alone means that an established connection broke
            return f"{says(address, tls)} ({details})"
    return details


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
    ("grpc.max_send_message_length", protocol.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", protocol.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC uses this as the time in which a connection must be established, despite its name.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The sender retries, from the position that the collector has stored. gRPC would only repeat the start of a stream,
    # and keep what was sent for that.
    ("grpc.enable_retries", 0),
)


def make_channel(options: Forward) -> Any:
    """Creates a channel to the collector.

    Raises:
        RemoteError: a file is not a certificate or a key.
        OSError: a file cannot be read.
    """
    if options.tls_ca is None:
        return grpc.insecure_channel(options.address, options=CHANNEL_OPTIONS)
    check_tls_files(options.tls_ca, options.tls_cert, options.tls_key)
    read = {
        name: None if path is None else Path(path).read_bytes()
        for name, path in (
            ("root_certificates", options.tls_ca),
            ("private_key", options.tls_key),
            ("certificate_chain", options.tls_cert),
        )
    }
    credentials = grpc.ssl_channel_credentials(**read)
    return grpc.secure_channel(options.address, credentials, options=CHANNEL_OPTIONS)


def metadata_of(options: Forward) -> tuple[tuple[str, str], ...]:
    """Metadata of each call: the client's token."""
    return (("authorization", f"Bearer {options.token}"),) if options.token else ()


def translated(error: Any, address: str, *, tls: bool) -> TransportError:
    """Translates the error of a call to the collector at `address`; `tls`: whether the call used TLS."""
    code = error.code()
    said = explain_grpc_error(foreign(error.details()) or "no reason given", address, tls=tls)
    text = f"{said} ({address}, {code.name})"
    return StreamRefusedError(text) if code in REFUSALS else TransportError(text)


class GrpcTransport:
    """Transport of streams to one collector. See `hostcallback.receiver.remote.sending.transport.Transport`.

    Attributes:
        address: of the collector.
        tls: whether it uses TLS.
    """

    def __init__(self, options: Forward) -> None:
        """The channel connects with the first stream.

        Raises:
            RemoteError: a file is not a certificate or a key.
            OSError: a file cannot be read.
        """
        self.address = options.address
        self.tls = options.tls_ca is not None
        self._metadata = metadata_of(options)
        self._channel = make_channel(options)
        self._forward = self._channel.stream_stream(f"/{protocol.SERVICE}/{protocol.FORWARD}")

    def connect(self, key: StreamKey, on_ack: OnAck) -> GrpcStream:
        """Starts to send a stream, or continues it."""
        return GrpcStream(self._forward, self._metadata, self.address, key, on_ack, tls=self.tls)

    def serve(self, messages: Iterator[bytes]) -> Any:
        """Returns the call that receives control requests through the collector and sends `messages`."""
        return self._channel.stream_stream(f"/{protocol.SERVICE}/{protocol.CONTROL}")(
            messages, metadata=self._metadata
        )

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


class GrpcStream:
    """One stream that is being sent. See `hostcallback.receiver.remote.sending.transport.TransportStream`."""

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: Any,
        address: str,
        key: StreamKey,
        on_ack: OnAck,
        *,
        tls: bool = False,
    ) -> None:
        """Connects, and waits for the collector's position in the stream.

        Raises:
            StreamRefusedError: the collector refuses the stream.
            TransportError: the collector cannot be reached.
        """
        self._address = address
        self._tls = tls
        self._on_ack = on_ack
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(protocol.encode_hello(key))
        self._sent: StreamOffset | None = None
        # Neither `_error` nor `stored` needs a lock. The thread of acknowledgements writes them, the sender's reads
        # them. `stored` is written before `_opened` is set, for which the constructor waits. `_error` is set once: if
        # the sender sees it late, it loses some slices, which it sends again over the next connection.
        self._error: TransportError | None = None
        self._opened = threading.Event()
        self.stored = StreamOffset(0, 0)
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._thread = threading.Thread(target=self._receive, name="hostcallback-acks", daemon=True)
        self._thread.start()
        # The call's own deadline would also end a connected stream, which lives as long as the process.
        if not self._opened.wait(CONNECT_SEC):
            self.close()
            raise TransportError(f"the collector at {address} did not answer in {CONNECT_SEC:g} s")
        self.check()

    def send(self, piece: SegmentSlice) -> None:
        """Sends one slice."""
        self.check()
        # Consecutive slices need no position: the collector continues where the last one ended.
        if piece.position != self._sent:
            self._requests.put(protocol.encode_place(piece.position))
        for message in protocol.encode_bytes(piece.data):
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
            self.stored = protocol.decode_position(next(responses))
            self._opened.set()
            for response in responses:
                self._on_ack(protocol.decode_position(response))
            self._error = TransportError(f"the collector at {self._address} ended the stream")
        except StopIteration:
            self._error = TransportError(f"the collector at {self._address} ended the stream")
        except StreamRefusedError as error:  # what the sender says of an acknowledgement
            self._error = error
        except grpc.RpcError as error:
            self._error = translated(error, self._address, tls=self._tls)
        except OSError as error:
            # Of the spool. Without this the sender would wait for acknowledgements that no thread takes any more.
            self._error = TransportError(
                f"what {self._address} has stored cannot be removed from the spool: {error}"
            )
        except BadStreamError as error:
            self._error = StreamRefusedError(f"the program at {self._address} is not a collector: {error}")
        finally:
            self._opened.set()
