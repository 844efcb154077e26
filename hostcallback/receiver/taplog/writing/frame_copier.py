"""Copies a batch's frames out of the source's memory, in the form of a log: without gaps and with inline payloads."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hostcallback.receiver.sources.columns import BatchColumns
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import align, padding
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.decoder import decode_frame
from hostcallback.receiver.wire.frame import HEADER, Flags, encode_frame
from hostcallback.receiver.wire.truncation import encode_truncated, head

Room = Callable[[int], Array]
"""Returns that many bytes of memory, uint8, aligned to 8."""


MIN_FRAMES = 12
"""Fewer frames are copied one by one: computing runs costs more than it saves."""

_FLAGS = struct.Struct("<4xI")
_LENGTHS = struct.Struct("<44xIQ")
_EXTERNAL = int(Flags.EXTERNAL)
_FLAGS_AT = 4


def collect(batch: Batch, room: Room = lambda nbytes: np.empty(nbytes, np.uint8)) -> FrameBlock:
    """Copies the frames of a batch, before it is released. EXTERNAL frames become inline ones.

    Args:
        batch: the frames.
        room: provides the memory of the block; new memory by default.
    """
    if batch.columns is not None and batch.count >= MIN_FRAMES:
        block = _collect_runs(batch.columns, batch.count, room)
        if block is not None:
            return block
    parts: list[Any] = []
    offsets: list[int] = []
    end = 0
    for memory, offset, external in batch.frames:
        frame = memoryview(memory)[offset:]
        meta_bytes, payload_bytes = _LENGTHS.unpack_from(frame)
        start_bytes = HEADER.size + align(meta_bytes)
        offsets.append(end)
        if external is None:
            end += start_bytes + align(payload_bytes)
            parts.append(frame[: end - offsets[-1]])
            continue
        head = bytearray(frame[:start_bytes])
        (flags,) = _FLAGS.unpack_from(head)
        struct.pack_into("<I", head, _FLAGS_AT, flags & ~_EXTERNAL)
        parts += [head, external, padding(payload_bytes)]
        end += start_bytes + align(payload_bytes)
    data = room(end)
    done = 0
    for part in parts:
        size = len(part)
        data[done : done + size] = np.frombuffer(part, np.uint8)
        done += size
    return FrameBlock(data, np.array(offsets, np.int64))


def shortened(block: FrameBlock, limits: Mapping[int, int]) -> FrameBlock:
    """Returns the frames with truncated arrays where their consumer id has a limit, in elements of each array."""
    frames: list[Array] = []
    for start, stop in itertools.pairwise([*block.starts, block.data.size]):
        frame = block.data[start:stop]
        header, arrays = decode_frame(frame)
        elements = limits.get(header.consumer_id)
        if elements is not None and not header.flags & Flags.TRUNCATED:
            arrays, is_truncated = encode_truncated([head(array, elements) for array in arrays])
            flags = header.flags | (Flags.TRUNCATED if is_truncated else Flags(0))
            encoded = encode_frame(
                arrays, consumer_id=header.consumer_id, flags=flags, seq=header.seq, time_ns=header.time_ns,
                run_id=header.run_id, device=header.device,
            )  # fmt: skip
            frame = np.frombuffer(encoded, np.uint8)
        frames.append(frame)
    offsets = np.cumsum([0, *(len(frame) for frame in frames[:-1])])
    return FrameBlock(np.concatenate(frames), offsets)


def _collect_runs(columns: BatchColumns, count: int, room: Room) -> FrameBlock | None:
    # Frames follow each other, except at the ring's end and where frames were folded. None if any payload is outside.
    at = columns.offsets(count)
    words = columns.words
    index = at >> 3
    if (words[index] & np.uint64(_EXTERNAL << 32)).any():
        return None
    sixty_three, mask = np.uint64(63), np.uint64(2**64 - 64)
    meta = ((words[index + 5] >> np.uint64(32)) + sixty_three) & mask
    payload = (words[index + 6] + sixty_three) & mask
    ends = at + (meta + payload).view(np.int64) + HEADER.size
    breaks = np.flatnonzero(at[1:] != ends[:-1])
    starts = at[[0, *(breaks + 1)]].tolist()
    stops = ends[[*breaks, count - 1]].tolist()
    sizes = ends - at
    offsets = np.cumsum(sizes) - sizes
    data = room(int(offsets[-1] + sizes[-1]))
    done = 0
    for start, stop in zip(starts, stops, strict=True):
        data[done : done + stop - start] = columns.bytes[start:stop]
        done += stop - start
    return FrameBlock(data, offsets)
