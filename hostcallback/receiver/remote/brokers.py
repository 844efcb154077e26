"""How messages get from processes to collectors, by the address's scheme: directly or through a broker.

A broker is a folder next to this module and one entry in `BROKERS`, which names its functions. They are imported when
an address with the broker's scheme is first used, and so are the packages that they need. docs/contributing.md shows
how to add one.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """One kind of connection from processes to collectors. The last three fields name functions, `module:function`.

    Attributes:
        name: of its options of `hcb collect`: `--NAME URL`, `--NAME-run RUN`, `--NAME-ca FILE`.
        title: what it is, for messages, such as "NATS server".
        schemes: with which its addresses begin, such as "nats" in `nats://host:port`.
        example: an address.
        summary: what `--NAME` does, for the help.
        transport: makes the sending side, `Callable[[Forward], Transport]`. It raises HostCallbackError if a package
            is missing, or a file is not a certificate or a key.
        service: makes the collecting side, `Callable[[CollectFrom, Store, Grown], CollectingService]`, which tells
            `Grown` what it has stored; empty if collectors listen by themselves. It may raise ValueError for the URL.
        control: starts the thread that answers `hcb ctl --via`, `Callable[[Transport, StreamKey], ControlThread]`;
            empty if the broker carries no requests.
    """

    name: str
    title: str
    schemes: tuple[str, ...]
    example: str
    summary: str = ""
    transport: str
    service: str = ""
    control: str = ""


DIRECT = Broker(
    name="listen",
    title="collector",
    schemes=(),
    example="localhost:7070",
    transport="hostcallback.receiver.remote.sending.grpc_transport:GrpcTransport",
    control="hostcallback.receiver.remote.control.agent:ControlThread",
)
"""Without a broker: processes reach the collector by gRPC at `host:port`."""

BROKERS = [
    Broker(
        name="nats",
        title="NATS server",
        schemes=("nats", "tls"),
        example="nats://localhost:4222",
        summary="fetch messages that processes publish to NATS JetStream, nats://HOST:PORT; collectors share them",
        transport="hostcallback.receiver.remote.nats.transport:make_transport",
        service="hostcallback.receiver.remote.nats.transport:make_service",
    ),
]
"""Those that are known. Adding one before addresses are used makes it known, too."""


def broker_of(address: str) -> Broker:
    """The broker of an address, by its scheme; `DIRECT` if none has it."""
    scheme, separator, _ = address.partition("://")
    return next((broker for broker in BROKERS if separator and scheme in broker.schemes), DIRECT)


def expected(brokers: Sequence[Broker] = BROKERS) -> str:
    """What an address may be, for error messages."""
    others = "".join(f", or a {broker.title}, {broker.example!r}" for broker in brokers)
    return f"the collector's host:port, such as {DIRECT.example!r}{others}"


def load(reference: str) -> Any:
    """The function that an entry names as `module:function`; imports the module."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
