"""The native encoder writes the bytes of the reference encoder."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import CASES, GOLDEN, Array, arrays_of_any_dtype, header_fields

from hostcallback.receiver.wire.array_types import ArraySpec, pack_subbyte, wire_type_of
from hostcallback.receiver.wire.frame import encode_frame, encode_prefix


def native_encode(
    arrays: Sequence[Array],
    *,
    consumer_id: int,
    flags: int = 0,
    **stamp: int,
) -> bytes:
    """`encode_frame` by the native library."""
    from hostcallback.receiver.native import bindings as native_library

    library = native_library.load()
    prefix = encode_prefix(consumer_id, flags, [ArraySpec.of(a.dtype, a.shape) for a in arrays])
    # Arguments as XLA passes them to the handler: C order, sub-byte dtypes packed.
    blobs = [
        pack_subbyte(a)
        if wire_type_of(a.dtype).bits < 8
        else np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        for a in arrays
    ]
    count = len(blobs)
    addresses = (ctypes.c_void_p * count)(*(blob.ctypes.data for blob in blobs))
    sizes = (ctypes.c_uint64 * count)(*(blob.size for blob in blobs))
    parts = (native_library.Stamp(**stamp), prefix, len(prefix), count, addresses, sizes)
    needed = library.hcb_encode_frame(*parts, None, 0)
    # 0xaa everywhere, so that padding must be written, and nothing behind the frame.
    out = (ctypes.c_uint8 * (needed + 64)).from_buffer(bytearray(b"\xaa" * (needed + 64)))
    assert library.hcb_encode_frame(*parts, out, needed + 64) == needed
    written = bytes(out)
    assert written[needed:] == b"\xaa" * 64, "wrote behind the frame"
    return written[:needed]


@pytest.mark.native_only
@pytest.mark.parametrize("name", CASES)
def test_the_native_encoder_reproduces_the_golden_bytes(name: str) -> None:
    case = CASES[name]
    assert native_encode(case.arrays, **case.header) == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.native_only
@given(st.lists(arrays_of_any_dtype(), max_size=5), header_fields)
def test_native_and_reference_encoder_agree_on_every_frame(
    arrays: list[Array], fields: dict[str, int]
) -> None:
    assert native_encode(arrays, **fields) == encode_frame(arrays, **fields)
