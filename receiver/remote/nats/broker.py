"""NATS JetStream as a broker: makes its sending and its collecting side."""

from __future__ import annotations

from receiver.remote.collector.services import CollectFrom, CollectingService, Grown
from receiver.remote.collector.store import Store
from receiver.remote.nats.collector import NatsCollector
from receiver.remote.nats.connection import NatsServer
from receiver.remote.nats.subjects import token
from receiver.remote.nats.transport import NatsTransport
from receiver.remote.options import Forward
from receiver.remote.sending.transport import Transport


def make_transport(options: Forward) -> Transport:
    """See `receiver.remote.brokers.Broker.make_transport`."""
    server = NatsServer(
        url=options.address, token=options.token, tls_ca=options.tls_ca, tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )  # fmt: skip
    return NatsTransport(server, options.folder)


def make_service(source: CollectFrom, store: Store, on_grown: Grown) -> CollectingService:
    """See `receiver.remote.brokers.Broker.make_service`. Collectors of the same run share the messages."""
    server = NatsServer(url=source.url, token=source.token, tls_ca=source.tls_ca)
    durable = f"hcb-collect-{token(source.run)}" if source.run else "hcb-collect"
    return NatsCollector(store, server, durable=durable, run=source.run, on_grown=on_grown)
