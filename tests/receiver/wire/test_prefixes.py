"""A prefix is the part of a frame that a program knows when it is compiled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import SCALAR, Array, arrays_of_any_dtype, header_fields

from hostcallback.receiver.errors import CorruptFrameError
from hostcallback.receiver.wire.array_types import ArraySpec, dtype_of, encode_metadata
from hostcallback.receiver.wire.frame import (
    Flags,
    Header,
    decode_header,
    encode_frame,
    encode_prefix,
    frame_from_prefix,
)


@given(st.lists(arrays_of_any_dtype(), max_size=5), header_fields)
def test_a_prefix_filled_in_is_the_frame(arrays: list[Array], fields: dict[str, int]) -> None:
    specs = [ArraySpec.of(a.dtype, a.shape) for a in arrays]
    prefix = encode_prefix(fields["consumer_id"], fields["flags"], specs)
    header = decode_header(prefix)
    assert header == Header(
        Flags(fields["flags"]), fields["consumer_id"], 0, 0, 0, 0, len(encode_metadata(specs)), 0, 0
    )
    assert len(prefix) == header.payload_start
    stamp = {k: v for k, v in fields.items() if k not in ("consumer_id", "flags")}
    assert frame_from_prefix(prefix, arrays, **stamp) == encode_frame(arrays, **fields)


def test_byte_order_and_strides_of_the_source_do_not_matter() -> None:
    plain = np.arange(24, dtype="<f4").reshape(4, 6)
    expected = encode_frame([plain], consumer_id=1)
    for other in (plain.astype(">f4"), np.asfortranarray(plain), np.repeat(plain, 2, axis=1)[:, ::2]):
        assert encode_frame([other], consumer_id=1) == expected
    packed = np.arange(8).astype(dtype_of(21))
    assert encode_frame([packed[::2]], consumer_id=1) == encode_frame([packed[::2].copy()], consumer_id=1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], "0 arrays for a prefix that announces 1"),
        ([np.zeros(2, np.float32)] * 2, "2 arrays"),
        ([np.zeros(3, np.float32)], r"float32\[3\] where the prefix announces float32\[2\]"),
        ([np.zeros(2, np.int32)], r"int32\[2\] where"),
    ],
)
def test_arrays_that_the_prefix_does_not_announce_are_refused(arrays: list[Array], message: str) -> None:
    prefix = encode_prefix(1, 0, [ArraySpec.of(np.dtype(np.float32), (2,))])
    with pytest.raises(ValueError, match=message):
        frame_from_prefix(prefix, arrays)


def test_a_prefix_with_something_behind_it_is_refused() -> None:
    with pytest.raises(CorruptFrameError, match="the prefix has 192 bytes, expected 128"):
        frame_from_prefix(SCALAR, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"consumer_id": -1},
        {"consumer_id": 2**64},
        {"consumer_id": 1, "seq": -1},
        {"consumer_id": 1, "time_ns": 2**63},
        {"consumer_id": 1, "device": 2**31},
        {"consumer_id": 1, "flags": Flags.EXTERNAL},
        {"consumer_id": 1, "flags": Flags.BUSY | Flags.ORDERED},
        {"consumer_id": 1, "flags": 16},
    ],
)
def test_numbers_that_do_not_fit_the_header_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        encode_frame([], **fields)
