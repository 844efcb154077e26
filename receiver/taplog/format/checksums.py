"""The checksums of a chunk's pages: zlib's CRC-32, computed by the native library where it is there and can."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from receiver.native import bindings as native_library
from receiver.wire.dtypes import Array

PAGE_BYTES = 4096

HOLDING_BYTES = 1 << 20
"""For so much it does not pay to let go of the interpreter lock."""


def crc32(data: Any) -> int:
    """The checksum of everything in a segment: that of zlib."""
    return zlib.crc32(data)


def page_count(stored_bytes: int) -> int:
    """How many checksums a chunk of so many stored bytes has."""
    return -(-stored_bytes // PAGE_BYTES)


def page_checksums(data: Any) -> Array:
    """The checksum of each page of `data`, bytes or the like; uint32."""
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
