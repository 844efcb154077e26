"""Units as a process publishes them, for the tests of NATS."""

from __future__ import annotations

import numpy as np

from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.remote.nats.publication import Publication, publications_of
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.wire.frame import encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

KEY = StreamKey("run", 3, "0123456789abcdef")


def described(number: int) -> TapDescriptor:
    return TapDescriptor(f"tap.{number}", "a.py:1 (f)", number, "tap", {}, {}, (), ["array"], None, "global")


def block_of(sizes: list[int], taps: int = 2) -> FrameBlock:
    frames = [
        encode_frame(
            [np.full(size, seq, np.float32)], consumer_id=seq % taps, seq=seq, time_ns=seq, run_id=1, device=0
        )
        for seq, size in enumerate(sizes)
    ]
    offsets = np.cumsum([0, *map(len, frames)])[:-1]
    return FrameBlock(np.frombuffer(bytearray(b"".join(frames)), np.uint8), offsets)


def units(block: FrameBlock, taps: int = 2, max_bytes: int = 1 << 20) -> list[Publication]:
    steps = np.arange(len(block), dtype=np.int64)
    about = {number: described(number) for number in range(taps)}
    writer = Writer("p", "host", 7, 3)
    run = Stretch(writer, "cpu:0", block, steps, 0, len(block), {2: 5}, about, None)  # type: ignore[arg-type]
    return list(publications_of(KEY, run, {"cpu:0": 0}, max_bytes))
