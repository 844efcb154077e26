"""The benchmarks of forwarding through NATS JetStream, and of export to an OpenTelemetry Collector."""

from __future__ import annotations

import sys
import time
from time import perf_counter

import numpy as np

import hostcallback as hcb
from hostcallback.receiver.messages import Consumer, Message
from tools.bench.blocks import TAP
from tools.bench.row import Row, measure
from tools.bench.rows.remote.forwarding import through_spool
from tools.bench.servers import (
    bare_server,
    collector,
    folder_in_memory,
    forget_stored,
    nats_server,
    nats_server_program,
)

NATS_BYTES = 32 << 20
EXPORTED = 50_000
FLUSH_SEC = 120.0


def forwarding_nats(rounds: int) -> list[Row]:
    """32 MiB through a spool until JetStream has stored them, compared with a collector over gRPC.

    A collector fetches them meanwhile, as one would. Large messages have 64 KiB, small ones are float32 scalars.
    """
    program = nats_server_program()
    if program is None:
        print("forwarding_nats: left out: nats-server is not installed", file=sys.stderr)
        return []
    with folder_in_memory() as folder, nats_server(program, folder) as (url, _):
        with collector(folder / "direct") as address, collector(folder / "nats", "--nats", url):

            def one(to: str, message_bytes: int) -> tuple[float, float]:
                forget_stored(folder / "direct")
                return through_spool(to, folder / "spool", message_bytes, NATS_BYTES)

            figures = measure(
                [
                    lambda: one(url, 64 << 10)[0],
                    lambda: one(address, 64 << 10)[0],
                    lambda: one(url, 4)[1],
                    lambda: one(address, 4)[1],
                ],
                min(rounds, 3),
            )
    large, large_direct, small, small_direct = figures
    peer = "to a collector over gRPC"
    return [
        large.versus(large_direct, "through the spool to NATS JetStream", "ms/MiB", peer, None),
        small.versus(
            small_direct, "small messages through the spool to NATS JetStream", "us/message", peer, None
        ),
    ]


def exporting_otlp(rounds: int) -> list[Row]:
    """50,000 scalars, a point of a gauge each, until an OTLP server that does nothing with them has taken them."""
    consumer = Consumer(TAP.consumer_id, TAP.name, TAP.source_line, print, (), {}, describe=lambda: TAP)
    scalar = np.float32(1)
    with bare_server() as address:
        with hcb.otlp(address, queue_messages=2 * EXPORTED, queue_bytes=1 << 30) as exporter:

            def export() -> float:
                start = perf_counter()
                for seq in range(EXPORTED):
                    exporter(Message(consumer, [np.asarray(scalar)], seq, time.time_ns(), 1, "cpu:0", None))
                assert exporter.flush(FLUSH_SEC)
                return (perf_counter() - start) / EXPORTED * 1e6

            (exported,) = measure([export], min(rounds, 5))
            assert not exporter.counters.lost
    return [exported.within(100.0, "scalars exported to an OTLP server", "us/message", None)]
