"""Checksums of a chunk's pages: zlib's CRC-32, computed by the native library if possible."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.wire.dtypes import Array

PAGE_BYTES = 4096

HOLDING_BYTES = 1 << 20
"""Up to this many bytes, releasing the interpreter lock would cost more than the checksum."""


def crc32(data: Any) -> int:
    """zlib's CRC-32, the checksum of everything in a segment."""
    return zlib.crc32(data)


def page_count(stored_bytes: int) -> int:
    """Number of checksums of a chunk with `stored_bytes` bytes."""
    return -(-stored_bytes // PAGE_BYTES)


def page_checksums(data: Any) -> Array:
    """CRC-32 of each page of `data` (bytes-like): little-endian uint32, shape (pages,)."""
    pages = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    found = np.empty(page_count(pages.size), "<u4")
    native = _native(pages.size <= HOLDING_BYTES)
    if native is None or not native(pages.ctypes.data, pages.size, PAGE_BYTES, found.ctypes.data):
        found[:] = [crc32(pages[start : start + PAGE_BYTES]) for start in range(0, pages.size, PAGE_BYTES)]
    return found


@functools.cache
def _native(holding_lock: bool) -> Any:
    if not native_library.available():
        return None
    library = native_library.load_holding_lock() if holding_lock else native_library.load()
    return library.hcb_page_checksums
