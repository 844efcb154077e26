"""The benchmarks of forwarding to a collector in another process, compared with a bare gRPC stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import grpc

import hostcallback as hcb
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.sending.grpc_transport import CHANNEL_OPTIONS, GrpcTransport
from hostcallback.receiver.remote.sending.sender import Sender
from hostcallback.receiver.remote.spool.spool import FLUSH_BYTES, Spool
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, StreamFolder
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from tools.bench.blocks import TAP, block_with
from tools.bench.row import Figure, Row, measure
from tools.bench.rows import training
from tools.bench.servers import bare_server, collector, folder_in_memory, forget_stored

TOTAL_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
WAIT_SEC = 300.0


def options_for(address: str, spool: Path) -> hcb.Forward:
    """A spool that is never full."""
    return hcb.Forward(address, spool=spool, spool_bytes=4 * TOTAL_BYTES, drain_sec=WAIT_SEC)


def _bare(address: str, method: str, pieces: Iterator[bytes]) -> float:
    options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", 2 << 20)]
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(WAIT_SEC)
        call = channel.stream_unary(f"/bare.Bare/{method}")
        start = perf_counter()
        call(pieces)
        return _per_mib(start)


def _same_piece() -> Iterator[bytes]:
    piece = bytes(PIECE_BYTES)
    return iter([piece] * (TOTAL_BYTES // PIECE_BYTES))


def _file_pieces(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    for offset in range(0, TOTAL_BYTES, PIECE_BYTES):
        yield os.pread(descriptor, PIECE_BYTES, offset)
    os.close(descriptor)


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
    has our options. The stream from a file to a file reads each piece, and its server, whose allocator is set like the
    collector's, writes it: no forwarding can do less. The small messages are float32 scalars: frames of 192 bytes.
    """
    with folder_in_memory() as folder, bare_server() as bare, bare_server(str(folder)) as storing:
        source = folder / "source.bin"
        source.write_bytes(bytes(TOTAL_BYTES))
        spool = folder / "spool"
        with collector(folder) as address:

            def whole(message_bytes: int) -> tuple[float, float]:
                forget_stored(folder)
                return through_spool(address, spool, message_bytes, TOTAL_BYTES)

            figures = measure(
                [
                    lambda: _left(address, spool),
                    lambda: whole(64 << 10)[0],
                    lambda: _bare(bare, "Take", _same_piece()),
                    lambda: _bare(storing, "Store", _file_pieces(source)),
                    lambda: whole(4)[1],
                ],
                min(rounds, 5),
            )
    left, both, dropped, stored, message = figures
    peer, floor = "a bare gRPC stream", "a bare stream from a file to a file"
    return [
        left.versus(dropped, "forwarding what is in the spool", "ms/MiB", peer, 1.25),
        left.versus(stored, "the same", "ms/MiB", floor, None),
        both.versus(dropped, "forwarding, with writing the spool", "ms/MiB", peer, 2.0),
        both.versus(stored, "the same", "ms/MiB", floor, None),
        message.within(1.0, "small messages through the spool into one collector", "us/message"),
    ]


def forwarded_training_loop(rounds: int) -> Row:
    """The training loop of the demo with 10 taps a step, forwarded to a collector on the same machine."""
    with folder_in_memory() as folder, collector(folder) as address:
        with hcb.outfeed_receiver(forward=options_for(address, folder / "spool")):
            row = training.training_loop(rounds)
    mine, peer = Figure(row.ours, row.spread), Figure(row.peer, 0.0)
    return mine.versus(peer, f"{row.name}, forwarded", row.unit, row.peer_name, 1.08)
