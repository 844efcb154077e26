"""The checksums of pages are zlib's, with the native library and without."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.layout import PAGE_BYTES, page_checksums

LENGTHS = [
    *range(200),
    1000,
    PAGE_BYTES - 1,
    PAGE_BYTES,
    PAGE_BYTES + 1,
    3 * PAGE_BYTES + 64,
    40 * PAGE_BYTES + 7,
    layout.HOLDING_BYTES + 5,
]


@pytest.fixture(params=["native", "zlib"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "native" and not native_library.available():
        pytest.skip("the native library is not built")
    monkeypatch.setattr(native_library, "available", lambda: request.param == "native")
    layout._native.cache_clear()
    yield
    layout._native.cache_clear()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_the_checksums_of_pages_match_zlib(nbytes: int) -> None:
    data = os.urandom(nbytes)
    expected = [zlib.crc32(data[start : start + PAGE_BYTES]) for start in range(0, nbytes, PAGE_BYTES)]
    assert page_checksums(data).tolist() == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("start", range(17))
def test_memory_need_not_be_aligned(start: int) -> None:
    data = np.arange(2 * PAGE_BYTES, dtype=np.uint8)[start:]
    expected = [zlib.crc32(data[at : at + PAGE_BYTES].tobytes()) for at in range(0, data.size, PAGE_BYTES)]
    assert page_checksums(data).tolist() == expected
