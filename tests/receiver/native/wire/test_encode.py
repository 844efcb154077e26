"""The native encoder against the reference encoder: identical bytes for anything."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from receiver import wire
from receiver.native import bindings as native

pytestmark = pytest.mark.native_only


def encode(arrays, out_bytes=None, **fields) -> tuple[int, bytes]:
    """What hcb_encode_frame returns and writes into a buffer of `out_bytes` (enough by default) full of 0xff."""
    library = native.load()
    stamped = {k: fields.pop(k) for k in ("seq", "position", "time_ns", "run_id", "device") if k in fields}
    prefix = wire.encode_prefix(
        fields["consumer_id"], fields["flags"], [wire.ArraySpec.of(a.dtype, a.shape) for a in arrays]
    )
    addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    nbytes = (ctypes.c_uint64 * len(arrays))(*(a.nbytes for a in arrays))
    size = 1 << 20 if out_bytes is None else out_bytes
    out = (ctypes.c_uint8 * size).from_buffer(bytearray(b"\xff" * size))
    length = library.hcb_encode_frame(
        native.Stamp(**stamped), prefix, len(prefix), len(arrays), addresses, nbytes, out, size
    )
    return length, bytes(out)


arrays = st.lists(
    st.one_of(
        npst.arrays(
            st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex128, np.bool_]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        ),
    ),
    max_size=6,
)


@given(
    arrays,
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2, 3]),
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**31), 2**31 - 1),
)
def test_native_and_reference_encoder_write_the_same_bytes(
    values, consumer_id, flags, unsigned, signed, device
):
    fields = {
        "consumer_id": consumer_id,
        "flags": flags,
        "seq": unsigned,
        "position": unsigned // 2,
        "time_ns": signed,
        "run_id": ~signed,
        "device": device,
    }
    values = [np.ascontiguousarray(v).reshape(v.shape) for v in values]
    reference = wire.encode_frame(values, **fields)
    length, written = encode(values, **fields)
    assert written[:length] == reference
    assert set(written[length:]) <= {0xFF}, "wrote behind the frame"


def test_a_frame_that_does_not_fit_is_not_written():
    array = np.arange(100)
    length, written = encode([array], out_bytes=500, consumer_id=1, flags=0)
    assert length == len(wire.encode_frame([array], consumer_id=1, flags=0)) > 500
    assert set(written) == {0xFF}


def test_an_invalid_prefix_gives_no_frame():
    out = (ctypes.c_uint8 * 64)()
    assert native.load().hcb_encode_frame(native.Stamp(), b"short", 5, 0, None, None, out, 64) == 0
