"""The native encoder writes a frame as a whole, or nothing."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import encode_frame, encode_prefix

pytestmark = pytest.mark.native_only


def encode(arrays, out_bytes=None, **fields) -> tuple[int, bytes]:
    """Result of hcb_encode_frame, and its output in a buffer of `out_bytes` (enough by default) full of 0xff."""
    library = native.load()
    stamped = {k: fields.pop(k) for k in ("seq", "position", "time_ns", "run_id", "device") if k in fields}
    prefix = encode_prefix(
        fields["consumer_id"], fields["flags"], [ArraySpec.of(a.dtype, a.shape) for a in arrays]
    )
    addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    nbytes = (ctypes.c_uint64 * len(arrays))(*(a.nbytes for a in arrays))
    size = 1 << 20 if out_bytes is None else out_bytes
    out = (ctypes.c_uint8 * size).from_buffer(bytearray(b"\xff" * size))
    length = library.hcb_encode_frame(
        native.Stamp(**stamped), prefix, len(prefix), len(arrays), addresses, nbytes, out, size
    )
    return length, bytes(out)


def test_a_frame_that_does_not_fit_is_not_written():
    array = np.arange(100)
    length, written = encode([array], out_bytes=500, consumer_id=1, flags=0)
    assert length == len(encode_frame([array], consumer_id=1, flags=0)) > 500
    assert set(written) == {0xFF}


def test_an_invalid_prefix_gives_no_frame():
    out = (ctypes.c_uint8 * 64)()
    assert native.load().hcb_encode_frame(native.Stamp(), b"short", 5, 0, None, None, out, 64) == 0
