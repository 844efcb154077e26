"""zstd for compressed logs, from an optional package."""

from __future__ import annotations

from typing import Any

from receiver.taplog.format.errors import TapLogError

PORTION_BYTES = 4096

LEVEL = 1
"""The fastest of zstd's usual levels: recording must not slow the program down more than writing does."""


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise TapLogError(
            "a compressed tap log needs the package zstandard: pip install 'hostcallback[zstd]'"
        ) from error
    return zstandard


class Compressor:
    """Compresses chunks with zstd. One thread at a time."""

    def __init__(self) -> None:
        """Raises TapLogError if zstandard is missing."""
        self._compressor = _zstandard().ZstdCompressor(level=LEVEL, write_content_size=True)

    def __call__(self, data: Any) -> bytes:
        """Compresses data into one zstd frame."""
        compressed: bytes = self._compressor.compress(data)
        return compressed


def decompress(data: Any, raw_bytes: int) -> bytes:
    """Decompresses `data`, or the intact beginning of damaged or truncated data; at most `raw_bytes`.

    Raises:
        TapLogError: zstandard is missing.
    """
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    pieces: list[bytes] = []
    done = 0
    # In small portions: everything that precedes a damaged portion is still decompressed.
    view = memoryview(data)
    for start in range(0, len(view), PORTION_BYTES):
        try:
            piece = decompressor.decompress(view[start : start + (PORTION_BYTES)])
        except zstandard.ZstdError:
            break
        pieces.append(piece)
        done += len(piece)
        if done > raw_bytes or decompressor.eof:
            break
    return b"".join(pieces)[:raw_bytes]
