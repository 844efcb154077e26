"""The metadata of a frame: one valid form, and errors for everything else."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import assert_same_arrays, ways

from hostcallback.receiver.errors import CorruptFrameError, UnsupportedDtypeError
from hostcallback.receiver.wire.array_types import (
    WIRE_TYPES,
    ArraySpec,
    decode_metadata,
    encode_metadata,
    payload_layout,
)
from hostcallback.receiver.wire.frame import encode_frame

specs_of_any_kind = st.lists(
    st.builds(
        ArraySpec,
        st.sampled_from([t.code for t in WIRE_TYPES]),
        st.lists(st.integers(0, 300), max_size=6).map(tuple),
    ),
    max_size=40,
)


@given(specs_of_any_kind)
def test_metadata_round_trip_and_match_msgpack(specs: list[ArraySpec]) -> None:
    metadata = encode_metadata(specs)
    assert metadata == msgpack.packb([[s.type_code, list(s.shape)] for s in specs])
    assert decode_metadata(metadata) == tuple(specs)


@given(specs_of_any_kind)
def test_arrays_are_in_order_aligned_and_as_dense_as_that_allows(specs: list[ArraySpec]) -> None:
    offsets, sizes, total = payload_layout(specs)
    end = 0
    for spec, offset, nbytes in zip(specs, offsets, sizes, strict=True):
        alignment = 64 if nbytes >= 64 else 8
        assert nbytes == math.ceil(math.prod(spec.shape) * spec.bits / 8)
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + nbytes
    assert total == end


@given(st.binary(max_size=40))
def test_arbitrary_metadata_decode_or_raise(metadata: bytes) -> None:
    try:
        specs = decode_metadata(metadata)
    except (CorruptFrameError, UnsupportedDtypeError):
        return
    assert encode_metadata(specs) == (metadata or b"\x90")


json_like = st.recursive(
    st.sampled_from([None, False, True, "", "a", b"", b"a", 1.0, {}, {1: 1}])
    | st.integers(-(2**63), 2**64 - 1),
    st.lists,
    max_leaves=8,
)


@pytest.mark.slow
@given(json_like | st.lists(st.tuples(json_like, json_like)))
def test_msgpack_of_something_else_decodes_or_raises(value: Any) -> None:
    metadata = msgpack.packb(value)
    try:
        specs = decode_metadata(metadata)
    except (CorruptFrameError, UnsupportedDtypeError):
        return
    assert encode_metadata(specs) == metadata


@pytest.mark.parametrize(
    "metadata",
    [
        b"\xdc\x00\x01\x92\x0b\x90",  # array16 of one entry
        b"\x91\x92\xcc\x0b\x90",  # uint8 11
        b"\x91\x92\x0b\x91\xc3",  # True for 1
        b"\x91\xc3\x90",  # not a pair
        b"\x91\x93\x0b\x90\x90",  # three of them
        b"\x91\x92\x0b\x91\xff",  # dimension -1
        b"\x91\x92\x0b\x91\xcb\x3f\xf0\0\0\0\0\0\0",  # dimension 1.0
        b"\x91\x92\x0b\x90\x00",  # something behind
        b"\x91\x92\x0b",  # something missing
        b"\x91\x92\x0b\xa0",  # a text for the shape
        b"\x91\x92\x0b\x92\xcf\x7f\xff\xff\xff\xff\xff\xff\xff\x02",  # 2**63 elements and more
        b"\x91\x92\x0b\x92\xcf\x7f\xff\xff\xff\xff\xff\xff\xff\x00",  # impossible to numpy though empty
        b"\x91\x92\x0b\xdc\x00\x41" + b"\x01" * 65,  # 65 dimensions
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xc1",
        b"\x80",
    ],
)
def test_metadata_in_any_but_the_one_right_form_are_corrupt(metadata: bytes) -> None:
    with pytest.raises(CorruptFrameError, match=r"expected the msgpack of \[\[type_code"):
        decode_metadata(metadata)


@pytest.mark.parametrize("code", [0, 13, 14, 17, 34, 2**40, -1])
def test_an_unknown_type_code_is_unsupported(code: int) -> None:
    with pytest.raises(UnsupportedDtypeError, match=f"type code {code}, this package knows.*upgrade"):
        decode_metadata(msgpack.packb([[code, []]]))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((-1,), "negative"),
        ((1,) * 65, "at most 64"),
        ((2**31, 2**31), "2\\*\\*63"),
        ((0, 2**62), "2\\*\\*63"),
    ],
)
def test_an_impossible_shape_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArraySpec.of(np.dtype(np.float32), shape)


def test_an_unknown_type_code_makes_no_spec() -> None:
    with pytest.raises(ValueError, match="type code 17"):
        ArraySpec(17, ())


def test_a_spec_takes_numpy_integers_and_refuses_floats() -> None:
    assert ArraySpec(11, (np.int64(2),)) == ArraySpec(11, (2,))  # type: ignore[arg-type]
    with pytest.raises((TypeError, AttributeError)):
        ArraySpec(11, (2.0,))  # type: ignore[arg-type]


def test_the_largest_rank_that_numpy_has() -> None:
    array = np.zeros((1,) * 64, np.int8)
    frame = encode_frame([array], consumer_id=1)
    for decode in ways(frame):
        assert_same_arrays(decode(frame)[-1], [array])
