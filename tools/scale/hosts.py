"""Hosts that forward to a collector, many in one process: `python -m tools.scale.hosts ADDRESS FOLDER FIRST COUNT`.

Each host has the parts of a forwarding process: a spool, a sender, live control, and a connection that no other host
uses. What it writes to its spool is kept under a second name, to be compared with the collector's files. A line of JSON
with the fields of `Load` is carried out by all hosts, and answered by a line with the fields of `Done`. An empty line
ends them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from hostcallback.receiver.remote.brokers import DIRECT, load
from hostcallback.receiver.remote.control.agent import ControlThread
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.grpc_transport import CHANNEL_OPTIONS, GrpcTransport
from hostcallback.receiver.remote.sending.sender import OnAck, Sender, TransportStream
from hostcallback.receiver.remote.spool.spool import Spool
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.writing.rotation import Folded
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from tools.bench.blocks import TAP, block_of

RUN = "scale"
DRAIN_SEC = 120.0


class Load(NamedTuple):
    """What each host does.

    Attributes:
        per_second: writes a second.
        messages: of a write.
        seconds: for which it does.
    """

    per_second: float
    messages: int
    seconds: float


class Done(NamedTuple):
    """What the hosts of one process have done.

    Attributes:
        messages: that were written.
        slices: that were sent.
        nbytes: of these slices.
        processor_sec: of this process.
        late_sec: how much later than planned the last write was.
        acks_ms: for each write, from the program's call until the host knows that the collector has it.
    """

    messages: int
    slices: int
    nbytes: int
    processor_sec: float
    late_sec: float
    acks_ms: list[float]


class _OwnConnection(GrpcTransport):
    # Shares no connection with other hosts, as gRPC's channels of one process do by default.

    def __init__(self, options: Forward) -> None:
        super().__init__(options)
        self._channel.close()
        own = ("grpc.use_local_subchannel_pool", 1)
        self._channel = grpc.insecure_channel(options.address, options=(*CHANNEL_OPTIONS, own))


class _Transport:
    # Counts what it sends.

    def __init__(self, options: Forward, on_ack: OnAck) -> None:
        direct = options.broker is DIRECT
        self.sends: Any = _OwnConnection(options) if direct else load(options.broker.transport)(options)
        self._noted = on_ack
        self.slices = self.nbytes = 0

    def connect(self, key: StreamKey, on_ack: OnAck) -> _Stream:
        def acked(position: StreamOffset) -> None:
            self._noted(position)  # first: who drains the stream goes on after the other
            on_ack(position)

        return _Stream(self.sends.connect(key, acked), self)

    def close(self) -> None:
        self.sends.close()


class _Stream:
    def __init__(self, stream: TransportStream, transport: _Transport) -> None:
        self._stream = stream
        self._transport = transport
        self.stored = stream.stored
        self.check = stream.check
        self.close = stream.close

    def send(self, piece: SegmentSlice) -> None:
        self._transport.slices += 1
        self._transport.nbytes += len(piece.data)
        self._stream.send(piece)


class _Spool(Spool):
    # Knows for each write when it began, and where in the stream it ends.

    def __init__(self, options: Forward, *, process_index: int, kept: Path) -> None:
        self._kept_at = kept
        self._linked = 0
        self.began: deque[float] = deque()
        self.on_way: deque[tuple[StreamOffset, float]] = deque()
        self.messages = 1  # of a write
        super().__init__(options, process_index=process_index)

    def wrote(self, segment: SegmentWriter, device: str, block: FrameBlock, folded: Folded) -> None:
        if segment.number != self._linked:
            self._linked = segment.number
            os.link(segment.path, self._kept_at / self.key.segment_name(segment.number))
        end = StreamOffset(segment.number, segment.nbytes)
        # Before the sender may send it.
        for _ in range(len(block) // self.messages):
            self.on_way.append((end, self.began.popleft()))
        super().wrote(segment, device, block, folded)


class Host:
    """One host. One thread writes.

    Attributes:
        phase: part of the time between two writes that passes before its first one.
        transport: counts slices.
        acks_ms: of the writes so far.
    """

    def __init__(self, address: str, folder: Path, number: int) -> None:
        """Starts to connect."""
        options = Forward(address, spool=folder / "spool", run=RUN)
        self.phase = random.Random(number).random()
        self.acks_ms: list[float] = []
        self._written = 0
        self._spool = _Spool(options, process_index=number, kept=folder / "kept")
        self._spool.on_closed = self._end
        self._spool.log.describe(TAP)
        self.transport = _Transport(options, self._acked)
        self._control = None
        if options.broker.control:
            self._control = ControlThread(self.transport.sends, self._spool.key)
        self._sender = Sender(self._spool, self.transport, window_bytes=options.window_bytes)

    def write(self, messages: int) -> None:
        """Hands messages with the next numbers to the log of the spool, as a receiver does."""
        block = _numbered(self._written, messages)
        self._written += messages
        self._spool.messages = messages
        self._spool.began.append(time.perf_counter())
        self._spool.log.append("cpu:0", block)

    def drain(self) -> None:
        """Waits until the collector has everything."""
        self._spool.log.flush()
        if not self._sender.drain(DRAIN_SEC):
            raise RuntimeError(
                f"{self._spool.key} is not stored after {DRAIN_SEC:g} s: {self._sender.refused}"
            )

    def close(self) -> None:
        """Completes the stream, and ends."""
        self._spool.log.close()

    def _acked(self, position: StreamOffset) -> None:
        now, on_way = time.perf_counter(), self._spool.on_way
        while on_way and on_way[0][0] <= position:
            self.acks_ms.append((now - on_way.popleft()[1]) * 1e3)

    def _end(self) -> None:
        if not self._sender.drain(DRAIN_SEC):
            raise RuntimeError(f"{self._spool.key} is not stored after {DRAIN_SEC:g} s")
        self._sender.stop()
        if self._control is not None:
            self._control.stop()
        self.transport.close()
        self._spool.folder.remove()


def _numbered(first: int, count: int) -> FrameBlock:
    # Frames whose sequence numbers and values, int32, are `first` and those after it.
    template = block_of(4, count, np.int32)
    words = template.data.view("<u8").reshape(count, -1)
    words[:, 2] = np.arange(first, first + count)
    words[:, 3] = time.time_ns()
    template.data.view("<i4").reshape(count, -1)[:, -16] = np.arange(first, first + count)
    return template


def carry_out(load: Load, hosts: list[Host]) -> Done:
    """Each host writes at even distances in time, from a random moment on."""
    slices, nbytes = _sent(hosts)
    used, start = time.process_time(), time.perf_counter()
    pause = threading.Event()
    writes = [
        ((number + host.phase) / load.per_second, host)
        for host in hosts
        for number in range(round(load.per_second * load.seconds))
    ]
    for due_sec, host in sorted(writes, key=lambda write: write[0]):
        pause.wait(max(0.0, start + due_sec - time.perf_counter()))
        host.write(load.messages)
    pause.wait(max(0.0, start + load.seconds - time.perf_counter()))
    late_sec = time.perf_counter() - start - load.seconds
    for host in hosts:
        host.drain()
    used = time.process_time() - used
    slices_now, nbytes_now = _sent(hosts)
    acks_ms = [taken for host in hosts for taken in host.acks_ms]
    for host in hosts:
        host.acks_ms.clear()
    return Done(
        len(writes) * load.messages, slices_now - slices, nbytes_now - nbytes, used, late_sec, acks_ms
    )


def _sent(hosts: list[Host]) -> tuple[int, int]:
    return sum(host.transport.slices for host in hosts), sum(host.transport.nbytes for host in hosts)


def main(address: str, folder: Path, first: int, count: int) -> None:
    """Runs the hosts of this process."""
    hosts = [Host(address, folder, number) for number in range(first, first + count)]
    for host in hosts:
        host.drain()
    print("ready", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        given: dict[str, Any] = json.loads(line)
        print(json.dumps(carry_out(Load(**given), hosts)._asdict()), flush=True)
    for host in hosts:
        host.close()
    print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
