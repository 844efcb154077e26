"""Memory that a log takes while it is read as columns."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

import hostcallback as hcb
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.wire.frame import encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

TAP = TapDescriptor(
    name="loss", source_line="train.py:1 (train)", consumer_id=7, kind="tap", params={}, kwargs={}, transforms=(),
    tree=["array"], shards=None, sharding="global",
)  # fmt: skip


def test_columns_take_hardly_more_memory_while_they_are_read(tmp_path: Path) -> None:
    per_block, blocks = 5_000, 100
    frame = encode_frame([np.float32(1)], consumer_id=TAP.consumer_id)
    log = LogWriter(tmp_path)
    log.describe(TAP)
    for _ in range(blocks):
        data = np.frombuffer(bytearray(frame * per_block), np.uint8)
        log.append("cpu:0", FrameBlock(data, np.arange(per_block) * len(frame)))
    log.close()
    tap = hcb.read(tmp_path)[TAP.name]
    next(iter(tap))
    tracemalloc.start()
    columns = tap.to_numpy()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(columns[TAP.name]) == per_block * blocks
    assert peak_bytes < 1.7 * sum(column.nbytes for column in columns.values())
