"""The benchmarks of forwarding, to a collector in another process; beside a bare gRPC stream."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import bench_training
import grpc
import numpy as np
from bench_row import Figure, Row, measure

import hostcallback as hcb
from receiver.described import Described
from receiver.remote.forwarder import Forwarder
from receiver.remote.grpc_link import GrpcTransport
from receiver.remote.left_spool import LeftSpool
from receiver.remote.sender import Sender
from receiver.remote.spool import FLUSH_BYTES, Spool
from receiver.remote.spool_folder import StreamFolder
from receiver.taplog.block import Block
from receiver.wire import encode_frame

ROOT = Path(__file__).resolve().parents[1]
TOTAL_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
WAIT_SEC = 300.0

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Disks differ too much to be measured along."""

TAP = Described(
    name="bench", source_line="bench.py:1 (bench)", consumer_id=7, kind="tap", params={}, kwargs={}, transforms=(),
    tree=["array"], shards=None, sharding="global",
)  # fmt: skip


def _block(message_bytes: int, nbytes: int) -> Block:
    frame = encode_frame([np.zeros(message_bytes // 4, np.float32)], consumer_id=TAP.consumer_id)
    count = -(-nbytes // len(frame))
    return Block(np.frombuffer(bytearray(frame * count), np.uint8), np.arange(count) * len(frame))


@contextlib.contextmanager
def _collector(folder: Path) -> Iterator[str]:
    arguments = ("collect", "--quiet", "--listen", "localhost:0", "--log", str(folder / "collected"))
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "receiver.cli", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield line.split("collecting at ")[1].split()[0]
        process.terminate()


@contextlib.contextmanager
def _bare_server() -> Iterator[str]:
    program = Path(__file__).with_name("bare_grpc_server.py")
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"localhost:{int(process.stdout.readline())}"
        process.terminate()


def _options(address: str, spool: Path) -> hcb.Forward:
    return hcb.Forward(address, spool=spool, spool_bytes=4 * TOTAL_BYTES, drain_sec=WAIT_SEC)


def _bare(address: str) -> float:
    piece = bytes(PIECE_BYTES)
    with grpc.insecure_channel(address, options=(("grpc.max_send_message_length", 2 << 20),)) as channel:
        grpc.channel_ready_future(channel).result(WAIT_SEC)
        method = channel.stream_unary("/bare.Bare/Take")
        start = perf_counter()
        method(iter([piece] * (TOTAL_BYTES // PIECE_BYTES)))
        return _per_mib(start, TOTAL_BYTES)


def _per_mib(start: float, nbytes: int) -> float:
    return (perf_counter() - start) / (nbytes / (1 << 20)) * 1e3


def _fill(log: Spool, message_bytes: int, total_bytes: int) -> int:
    block = _block(message_bytes, FLUSH_BYTES)
    log.describe(TAP)
    for _ in range(0, total_bytes, block.data.size):
        log.append("cpu:0", block)
    return total_bytes // block.data.size * len(block)


def _left(address: str, folder: Path) -> float:
    # What is in a spool already, as of a process that was killed.
    log = Spool(_options(address, folder))
    _fill(log, 64 << 10, TOTAL_BYTES)
    log.close()
    log.folder.release()
    left = StreamFolder.take(log.folder.path)
    assert left is not None
    source = LeftSpool(left)
    transport = GrpcTransport(_options(address, folder))
    start = perf_counter()
    sender = Sender(source, transport, window_bytes=8 << 20, ends=True)
    assert sender.drain(WAIT_SEC)
    taken = _per_mib(start, TOTAL_BYTES)
    sender.stop()
    transport.close()
    source.end()
    return taken


def _through_spool(address: str, folder: Path, message_bytes: int) -> tuple[float, float]:
    # Milliseconds for each MiB, and microseconds for each message.
    recorder = Forwarder(_options(address, folder))
    assert recorder.drain(WAIT_SEC)
    start = perf_counter()
    messages = _fill(recorder._log, message_bytes, TOTAL_BYTES)  # type: ignore[arg-type]
    assert recorder.drain(WAIT_SEC)
    seconds = perf_counter() - start
    recorder.close()
    return seconds / (TOTAL_BYTES / (1 << 20)) * 1e3, seconds / messages * 1e6


def forwarding(rounds: int) -> list[Row]:
    """256 MiB from a process to a collector in another one, stored and acknowledged there, beside a bare gRPC stream.

    Forwarded is what is in a spool already, and what is written to one meanwhile. The bare stream sends as many
    pieces of 1 MiB as fast as gRPC takes them, to a server that drops them. The small messages are float32 scalars:
    frames of 192 bytes.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, _bare_server() as bare:
        folder = Path(name)
        with _collector(folder) as address:
            small: list[float] = []

            def scalars() -> float:
                small.append(_through_spool(address, folder / "spool", 4)[1])
                return small[-1]

            figures = measure(
                [
                    lambda: _left(address, folder / "spool"),
                    lambda: _through_spool(address, folder / "spool", 64 << 10)[0],
                    lambda: _bare(bare),
                    scalars,
                ],
                min(rounds, 5),
            )
    left, whole, peer, message = figures
    peer_name = "a bare gRPC stream"
    return [
        left.beside(peer, "forwarding what is in the spool", "ms/MiB", peer_name, 1.25),
        whole.beside(peer, "forwarding, with writing the spool", "ms/MiB", peer_name, 2.0),
        message.within(1.0, "small messages through the spool into one collector", "us/message"),
    ]


def forwarded_training_loop(rounds: int) -> Row:
    """The training loop of the demo with 10 taps a step, forwarded to a collector on the same machine."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        with _collector(folder) as address:
            with hcb.outfeed_receiver(forward=_options(address, folder / "spool")):
                row = bench_training.training_loop(rounds)
    mine, peer = Figure(row.ours, row.spread), Figure(row.peer, 0.0)
    return mine.beside(peer, f"{row.name}, forwarded", row.unit, row.peer_name, 1.08)
