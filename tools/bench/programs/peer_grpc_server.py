"""The peer server of the forwarding benchmarks: a gRPC server that drops or stores its input. Prints its port.

Given a folder, the server writes its input to files there, answers with the number of bytes for each 2 MiB, and keeps
freed memory, as a collector does. Without a folder it drops its input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from hostcallback.receiver.remote.collector.access import keep_freed_memory

SEGMENT_BYTES, ACK_BYTES = 16 << 20, 2 << 20


async def _take(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in requests:
        pass
    return b""


async def _store(requests: AsyncIterator[bytes], context: Any) -> None:
    written, descriptor = 0, -1
    async for message in requests:
        if written % SEGMENT_BYTES == 0:
            if descriptor >= 0:
                os.close(descriptor)
            path = Path(sys.argv[1], f"{written // SEGMENT_BYTES}.bin")
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        written += os.write(descriptor, message)
        if written % ACK_BYTES == 0:
            await context.write(str(written).encode())
    os.close(descriptor)


async def _echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for _ in requests:
        await context.write(b"stored")


async def _answer(request: bytes, context: Any) -> bytes:
    return b""


async def _serve() -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 2 << 20),))
    bare = {
        "Take": grpc.stream_unary_rpc_method_handler(_take),
        "Store": grpc.stream_stream_rpc_method_handler(_store),
    }
    bare["Echo"] = grpc.stream_stream_rpc_method_handler(_echo)
    export = {"Export": grpc.unary_unary_rpc_method_handler(_answer)}
    otlp = "opentelemetry.proto.collector"
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("bare.Bare", bare),
            grpc.method_handlers_generic_handler(f"{otlp}.logs.v1.LogsService", export),
            grpc.method_handlers_generic_handler(f"{otlp}.metrics.v1.MetricsService", export),
        )
    )
    print(server.add_insecure_port("localhost:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep_freed_memory()
    asyncio.run(_serve())
