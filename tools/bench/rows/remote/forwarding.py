"""The benchmarks of forwarding to a collector in another process, compared with a bare gRPC stream."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import grpc

import hostcallback as hcb
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.sending.grpc_transport import CHANNEL_OPTIONS, GrpcTransport
from hostcallback.receiver.remote.sending.sender import Sender
from hostcallback.receiver.remote.spool.spool import FLUSH_BYTES, SEGMENT_BYTES, SEND_SEC, Spool
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, StreamFolder
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from tools.bench.blocks import TAP, block_of, block_with
from tools.bench.row import Row, measure
from tools.bench.rows import training
from tools.bench.servers import bare_server, collector, folder_in_memory, forget_stored

TOTAL_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
WAIT_SEC = 300.0


def options_for(address: str, spool: Path) -> hcb.Forward:
    """A spool that is never full."""
    return hcb.Forward(address, spool=spool, spool_bytes=4 * TOTAL_BYTES, drain_sec=WAIT_SEC)


@contextlib.contextmanager
def _bare(address: str) -> Iterator[grpc.Channel]:
    options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", 2 << 20)]
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(WAIT_SEC)
        yield channel


def _dropped(address: str) -> float:
    piece = bytes(PIECE_BYTES)
    with _bare(address) as channel:
        start = perf_counter()
        channel.stream_unary("/bare.Bare/Take")(iter([piece] * (TOTAL_BYTES // PIECE_BYTES)))
        return _per_mib(start)


def _stored(address: str, folder: Path, *, meanwhile: bool) -> float:
    """Of a bare stream from files to files; a thread writes those that it reads, before or meanwhile.

    It computes the checksum of each page, as a log does, and does nothing with it.
    """
    files = [(folder / f"{n}.source").open("w+b", buffering=0) for n in range(TOTAL_BYTES // SEGMENT_BYTES)]
    written, block = threading.Semaphore(0), bytes(FLUSH_BYTES)

    def write() -> None:
        for file in files:
            for _ in range(0, SEGMENT_BYTES, FLUSH_BYTES):
                layout.page_checksums(block)
                file.write(block)
                written.release()

    def pieces() -> Iterator[bytes]:
        for file in files:
            for offset in range(0, SEGMENT_BYTES, PIECE_BYTES):
                for _ in range(0, PIECE_BYTES, FLUSH_BYTES):
                    written.acquire()
                yield os.pread(file.fileno(), PIECE_BYTES, offset)

    writer, removed = threading.Thread(target=write), 0
    with _bare(address) as channel:
        start = perf_counter()
        writer.start()
        if not meanwhile:
            writer.join()
            start = perf_counter()
        for answer in channel.stream_stream("/bare.Bare/Store")(pieces()):
            for file in files[removed : int(answer) // SEGMENT_BYTES]:
                file.close()
                Path(file.name).unlink()
                removed += 1
        assert removed == len(files)
        return _per_mib(start)


def _per_mib(start: float) -> float:
    return (perf_counter() - start) / (TOTAL_BYTES / (1 << 20)) * 1e3


def _fill(log: LogWriter, message_bytes: int, total_bytes: int) -> int:
    block = block_with(message_bytes, FLUSH_BYTES)
    log.describe(TAP)
    for _ in range(0, total_bytes, block.data.size):
        log.append("cpu:0", block)
    return total_bytes // block.data.size * len(block)


def _left(address: str, folder: Path) -> float:
    # Data already in a spool, as after a process was killed.
    spool = Spool(options_for(address, folder))
    _fill(spool.log, 64 << 10, TOTAL_BYTES)
    spool.log.close()
    spool.folder.release()
    left = StreamFolder.take(spool.folder.path)
    assert left is not None
    source = OrphanSpool(left)
    transport = GrpcTransport(options_for(address, folder))
    start = perf_counter()
    sender = Sender(source, transport, window_bytes=8 << 20, ends=True)
    assert sender.drain(WAIT_SEC)
    taken = _per_mib(start)
    sender.stop()
    transport.close()
    source.end()
    return taken


def through_spool(address: str, folder: Path, message_bytes: int, total_bytes: int) -> tuple[float, float]:
    """Milliseconds for each MiB, and microseconds for each message, until all is acknowledged."""
    recorder = Forwarder(options_for(address, folder))
    assert recorder.drain(WAIT_SEC)
    start = perf_counter()
    messages = _fill(recorder._log, message_bytes, total_bytes)
    assert recorder.drain(WAIT_SEC)
    seconds = perf_counter() - start
    recorder.close()
    return seconds / (total_bytes / (1 << 20)) * 1e3, seconds / messages * 1e6


def forwarding(rounds: int) -> list[Row]:
    """256 MiB from a process to a collector in another process, stored and acknowledged, against bare gRPC streams.

    The process forwards the data that is already in a spool, or data that it writes to the spool meanwhile. The bare
    stream sends one piece of 1 MiB again and again, as fast as gRPC takes it, to a server that drops it; its channel
    has our options. The stream from a file to a file reads each piece; its server, whose allocator is set like the
    collector's, writes it and answers for each 2 MiB, and files of 16 MiB that are answered are removed. Another thread
    computes checksums and writes the files, before or meanwhile, in blocks of 256 KiB: the least that sends what is
    safe on a disk before it is sent. The small messages are float32 scalars: frames of 192 bytes.
    """
    with folder_in_memory() as folder, bare_server() as bare, bare_server(str(folder)) as storing:
        spool = folder / "spool"
        with collector(folder) as address:

            def whole(message_bytes: int) -> tuple[float, float]:
                forget_stored(folder)
                return through_spool(address, spool, message_bytes, TOTAL_BYTES)

            figures = measure(
                [
                    lambda: _left(address, spool),
                    lambda: whole(64 << 10)[0],
                    lambda: _dropped(bare),
                    lambda: _stored(storing, folder, meanwhile=False),
                    lambda: _stored(storing, folder, meanwhile=True),
                    lambda: whole(4)[1],
                ],
                min(rounds, 5),
            )
    left, both, dropped, stored, written, message = figures
    peer, floor = "a bare gRPC stream", "a bare stream from a file to a file"
    return [
        left.versus(dropped, "forwarding what is in the spool", "ms/MiB", peer, 1.25),
        left.versus(stored, "the same", "ms/MiB", floor, None),
        both.versus(dropped, "forwarding, with writing the spool", "ms/MiB", peer, 2.0),
        both.versus(written, "the same", "ms/MiB", f"{floor}, which is written meanwhile", None),
        written.versus(dropped, f"{floor}, which is written meanwhile", "ms/MiB", peer, None),
        message.within(1.0, "small messages through the spool into one collector", "us/message"),
    ]


def forwarded_training_loop(rounds: int) -> list[Row]:
    """The training loop of the demo with 10 taps a step, forwarded to a collector on the same machine.

    The thread of the floor also sends as many bytes on a bare gRPC stream, each tenth of a second.
    """
    pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    unsent, sent_at = 0, perf_counter()

    def send(count: int) -> None:
        nonlocal unsent, sent_at
        unsent += count * block_of(4, 1).data.size
        if perf_counter() - sent_at > SEND_SEC:
            pieces.put(bytes(unsent))
            unsent, sent_at = 0, perf_counter()

    with folder_in_memory() as folder, collector(folder) as address, bare_server() as bare:
        with grpc.insecure_channel(bare, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_unary("/bare.Bare/Take").future(iter(pieces.get, None))
            with hcb.outfeed_receiver(forward=options_for(address, folder / "spool")):
                loop, floor = training.training_loop(rounds, send)
            pieces.put(None)
            call.result(WAIT_SEC)
    return [
        replace(loop, name=f"{loop.name}, forwarded", bound=1.05),
        replace(floor, peer_name=f"{floor.peer_name}, sent on a bare gRPC stream"),
    ]
