"""A gRPC server that does nothing with what it gets: the peer of the benchmarks of forwarding. Prints its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio


async def _take(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in requests:
        pass
    return b"done"


async def _serve() -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", 2 << 20),))
    handlers = {"Take": grpc.stream_unary_rpc_method_handler(_take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", handlers),))
    print(server.add_insecure_port("localhost:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
