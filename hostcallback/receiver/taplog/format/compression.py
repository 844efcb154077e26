"""The bytes of a chunk, compressed with zstd, which is an optional package."""

from __future__ import annotations

from typing import Any

from hostcallback.receiver import errors, limits

PORTION_BYTES = 1024
PIECE_BYTES = 1 << 20

LEVEL = 1
"""The fastest of zstd's usual levels: recording must not slow the program down more than writing does."""


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise errors.TapLogError(
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
    """Decompresses `data`, or as much as is intact; at most `raw_bytes`.

    No more is decompressed than `raw_bytes`, whatever the data would become: a few bytes may stand for gigabytes.

    Raises:
        TapLogError: zstandard is missing.
    """
    if not 0 <= raw_bytes <= limits.COMPRESSED_RAW_BYTES:
        return b""
    zstandard = _zstandard()
    raw = bytearray()
    try:
        with _decompressor(zstandard).stream_reader(data, read_across_frames=False) as reader:
            while len(raw) < raw_bytes:
                piece = reader.read(min(PIECE_BYTES, raw_bytes - len(raw)))
                if not piece:
                    break
                raw += piece
    except zstandard.ZstdError:  # the bytes before the damage are still good, but this call has dropped some
        return _until_damage(zstandard, data, raw_bytes)
    return bytes(raw)


def _decompressor(zstandard: Any) -> Any:
    return zstandard.ZstdDecompressor(max_window_size=limits.COMPRESSED_WINDOW_BYTES)


def _until_damage(zstandard: Any, data: Any, raw_bytes: int) -> bytes:
    # In small portions: what a portion yields before one that is damaged is good. A block of zstd takes 4 bytes at
    # least and yields 128 KiB at most, so a portion yields at most 32 MiB.
    decompressor = _decompressor(zstandard).decompressobj()
    raw = bytearray()
    view = memoryview(data)
    for start in range(0, len(view), PORTION_BYTES):
        try:
            raw += decompressor.decompress(view[start : start + PORTION_BYTES])
        except zstandard.ZstdError:
            break
        if len(raw) > raw_bytes or decompressor.eof:
            break
    return bytes(raw[:raw_bytes])
