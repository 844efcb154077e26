"""Many forwarding streams in one process, for the benchmark of 64 clients: prints how long acknowledgements took."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

import hostcallback as hcb
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.sending.grpc_transport import GrpcTransport
from hostcallback.receiver.remote.sending.sender import OnAck, TransportStream
from tools.bench.blocks import TAP, block_of
from tools.bench.programs.peer_grpc_clients import BareClient

MESSAGES = 10
DRAIN_SEC = 60.0


class Client:
    """One stream."""

    def __init__(self, options: hcb.Forward, process: int) -> None:
        self.seconds: list[float] = []
        self._transport = GrpcTransport(options)
        self._changed = threading.Condition()  # protects the fields below
        self._written: deque[tuple[StreamOffset, float]] = deque()
        with self._changed:  # the first acknowledgement may arrive before the spool exists
            self._forwarder = Forwarder(options, process_index=process, transport=self)
            self._log = self._forwarder._log
        self._log.describe(TAP)

    def connect(self, key: StreamKey, on_ack: OnAck) -> TransportStream:
        """See `hostcallback.receiver.remote.sending.sender.Transport`."""

        def acked(position: StreamOffset) -> None:
            on_ack(position)
            now = time.perf_counter()
            with self._changed:
                while self._written and self._written[0][0] <= position:
                    self.seconds.append(now - self._written.popleft()[1])
                self._changed.notify_all()

        return self._transport.connect(key, acked)

    def send(self) -> None:
        """Writes some messages to the spool, from where they must not wait."""
        self._log.append("cpu:0", block_of(4, MESSAGES))
        with self._changed:  # no acknowledgement is missed
            self._log.flush()
            number, path = self._forwarder._spool.folder.segments()[-1]
            self._written.append((StreamOffset(number, path.stat().st_size), time.perf_counter()))

    def drain(self) -> None:
        """Until all is acknowledged."""
        assert self._forwarder.drain(DRAIN_SEC)
        with self._changed:
            assert self._changed.wait_for(lambda: not self._written, DRAIN_SEC)

    def close(self) -> None:
        """Ends: as a transport, and the stream."""
        self._transport.close()

    def end(self) -> None:
        """Ends the stream."""
        self._forwarder.close()


def main() -> None:
    """Each client sends `--per-second` messages a second, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("spool", type=Path)
    for name in ("first", "clients", "per-second", "seconds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--bare", action="store_true", help="bare gRPC streams instead")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.clients)
    clients: list[Client | BareClient] = []
    for number in numbers:
        if arguments.bare:
            clients.append(BareClient(arguments.address, block_of(4, MESSAGES).data.size))
        else:
            clients.append(
                Client(hcb.Forward(arguments.address, spool=arguments.spool, control=False), number)
            )
    for client in clients:
        client.send()
        client.drain()
        client.seconds.clear()
    print("ready", flush=True)
    input()
    start, rate = time.perf_counter(), arguments.clients * arguments.per_second
    for number in range(rate * arguments.seconds):
        time.sleep(max(0.0, start + number / rate - time.perf_counter()))
        clients[number % len(clients)].send()
    late_sec = time.perf_counter() - start - arguments.seconds
    for client in clients:
        client.drain()
    seconds = np.concatenate([client.seconds for client in clients])
    assert seconds.size == rate * arguments.seconds, "not everything was acknowledged"
    print(json.dumps({"late_sec": late_sec, "seconds": seconds.tolist()}), flush=True)
    for client in clients:
        client.end()


if __name__ == "__main__":
    main()
