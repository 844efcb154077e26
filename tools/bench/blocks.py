"""Input of the forwarding benchmarks: blocks of frames of one tap."""

from __future__ import annotations

import numpy as np

from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.wire.frame import encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

TAP = TapDescriptor(
    name="bench", source_line="bench.py:1 (bench)", consumer_id=7, kind="tap", params={}, kwargs={}, transforms=(),
    tree=["array"], shards=None, sharding="global",
)  # fmt: skip


def block_of(message_bytes: int, count: int, dtype: type = np.float32) -> FrameBlock:
    """Frames with an array of float32, or another type of that size, each."""
    frame = encode_frame([np.zeros(message_bytes // 4, dtype)], consumer_id=TAP.consumer_id)
    return FrameBlock(np.frombuffer(bytearray(frame * count), np.uint8), np.arange(count) * len(frame))


def block_with(message_bytes: int, nbytes: int) -> FrameBlock:
    """Enough frames of this tap for the given number of bytes."""
    frame_bytes = block_of(message_bytes, 1).data.size
    return block_of(message_bytes, -(-nbytes // frame_bytes))
