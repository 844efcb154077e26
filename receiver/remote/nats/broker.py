"""NATS JetStream as a broker: makes its sending and its collecting side."""

from __future__ import annotations

from hostcallback.receiver.remote.collector.services import CollectFrom, CollectingService, Grown
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.nats.collector import NatsCollector
from hostcallback.receiver.remote.nats.connection import NatsServer
from hostcallback.receiver.remote.nats.subjects import token
from hostcallback.receiver.remote.nats.transport import NatsTransport
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.transport import Transport


def make_transport(options: Forward) -> Transport:
    """See `hostcallback.receiver.remote.sending.broker_transport.make_transport`."""
    server = NatsServer(
        url=options.address, token=options.token, tls_ca=options.tls_ca, tls_cert=options.tls_cert,
        tls_key=options.tls_key, insecure=options.insecure,
    )  # fmt: skip
    return NatsTransport(server, options.folder)


def make_service(source: CollectFrom, store: Store, on_grown: Grown) -> CollectingService:
    """See `make_service` of `receiver/remote/collector/services.py`. Collectors of the same run share the messages."""
    server = NatsServer(url=source.url, token=source.token, tls_ca=source.tls_ca, insecure=source.insecure)
    durable = f"hcb-collect-{token(source.run)}" if source.run else "hcb-collect"
    return NatsCollector(store, server, durable=durable, run=source.run, on_grown=on_grown)
