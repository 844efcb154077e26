"""Compressed chunks: what is intact of a damaged one is read, and never more than its header says."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from hostcallback.receiver import limits
from hostcallback.receiver.taplog.format import compression

BLOCK_BYTES = 128 << 10
RAW = np.random.default_rng(0).integers(0, 50, 8 * BLOCK_BYTES, np.uint8).tobytes()


@pytest.fixture(scope="module")
def stored() -> bytes:
    return compression.Compressor()(RAW)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES + 1, len(RAW) - 1, len(RAW), len(RAW) + 1])
def test_no_more_is_decompressed_than_was_asked_for(stored: bytes, nbytes: int) -> None:
    assert compression.decompress(stored, nbytes) == RAW[:nbytes]


@pytest.mark.parametrize("nbytes", [-1, limits.COMPRESSED_RAW_BYTES + 1])
def test_nothing_is_decompressed_to_a_size_that_no_chunk_has(stored: bytes, nbytes: int) -> None:
    assert compression.decompress(stored, nbytes) == b""


def offsets_of_blocks(stored: bytes) -> list[int]:
    """Where the blocks of a zstd frame begin, each with 3 bytes that have its type and its length."""
    at, found = zstandard.frame_header_size(stored), list[int]()
    while not found or not stored[found[-1]] & 1:  # not the last
        found.append(at)
        at += 3 + (int.from_bytes(stored[at : at + 3], "little") >> 3)
    return found


@pytest.mark.parametrize("intact", range(8))
def test_blocks_before_a_damaged_one_are_read(stored: bytes, intact: int) -> None:
    offsets = offsets_of_blocks(stored)
    assert len(offsets) == len(RAW) // BLOCK_BYTES
    damaged = bytearray(stored)
    damaged[offsets[intact]] |= 0b110  # a type that does not exist
    found = compression.decompress(bytes(damaged), len(RAW))
    assert found == RAW[: len(found)]
    # The last one may end in the portion that has the damage.
    assert max(0, intact - 1) * BLOCK_BYTES <= len(found) <= intact * BLOCK_BYTES
    cut_off = compression.decompress(stored[: offsets[intact]], len(RAW))
    assert cut_off == RAW[: intact * BLOCK_BYTES]


def test_what_was_never_compressed_has_nothing_intact(stored: bytes) -> None:
    assert compression.decompress(b"", 100) == b""
    assert compression.decompress(b"no zstd", 100) == b""
    assert compression.decompress(stored[1:], 100) == b""
