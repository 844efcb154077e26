"""Payloads outside the ring are viewed, or copied if they cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import Array, arrays_of_any_dtype, assert_same_array, assert_same_arrays, edited, warm, ways

from hostcallback.receiver.errors import CorruptFrameError, TruncatedFrameError
from hostcallback.receiver.wire.array_types import wire_type_of
from hostcallback.receiver.wire.decoder import decode_frame
from hostcallback.receiver.wire.frame import Flags, decode_header, encode_frame


def as_external(frame: bytes, arrays: Sequence[Array]) -> tuple[bytes, Array]:
    """The part of this frame that a ring holds if its payload travels outside, and the payload."""
    header, _ = decode_frame(frame)
    payload = np.frombuffer(frame, np.uint8, header.payload_bytes, header.payload_start)
    aligned = np.zeros(payload.size + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    owned = aligned[start : start + payload.size]
    owned[:] = payload
    inside = edited(frame, flags=header.flags | Flags.EXTERNAL)[: header.payload_start] + bytes(64)
    return inside, owned


@given(st.lists(arrays_of_any_dtype(), max_size=4))
def test_arrays_of_an_external_payload_are_views_of_it(arrays: list[Array]) -> None:
    frame = encode_frame(arrays, consumer_id=3, flags=1)
    inside, external = as_external(frame, arrays)
    assert decode_header(inside).frame_bytes == len(inside)
    for decode in ways(frame):
        consumer_id, flags, *_, decoded = decode(inside, 0, external)
        assert (consumer_id, flags) == (3, Flags.ORDERED | Flags.EXTERNAL)
        assert_same_arrays(decoded, arrays)
        for array in decoded:
            assert array.flags.behaved
            if array.size and wire_type_of(array.dtype).bits >= 8:
                assert np.shares_memory(array, external)


def test_an_external_payload_lives_as_long_as_its_arrays() -> None:
    frame = encode_frame([np.arange(100, dtype=np.float32)], consumer_id=3)
    inside, external = as_external(frame, [])
    (array,) = warm(frame)(inside, 0, external)[-1]
    del external
    assert array.sum() == 4950
    array[0] = 1


@pytest.mark.parametrize("readonly", [True, False], ids=["read-only", "misaligned"])
def test_an_external_payload_that_cannot_be_viewed_is_copied(readonly: bool) -> None:
    expected = np.arange(100, dtype=np.float32)
    frame = encode_frame([expected], consumer_id=3)
    inside, external = as_external(frame, [])
    if readonly:
        external.flags.writeable = False
    else:
        shifted = np.zeros(external.size + 1, np.uint8)
        start = 1 - shifted.ctypes.data % 2
        shifted[start : start + external.size] = external
        external = shifted[start : start + external.size]
    for decode in ways(frame):
        (array,) = decode(inside, 0, external)[-1]
        assert_same_array(array, expected)
        assert array.flags.behaved
        assert not np.shares_memory(array, external)


def test_a_frame_and_a_payload_that_do_not_belong_together_are_corrupt() -> None:
    frame = encode_frame([np.arange(100, dtype=np.float32)], consumer_id=3)
    inside, external = as_external(frame, [])
    for decode in ways(frame):
        with pytest.raises(CorruptFrameError, match="399 bytes, expected 400"):
            decode(inside, 0, external[:-1])
        with pytest.raises(CorruptFrameError, match="401 bytes, expected 400"):
            decode(inside, 0, np.zeros(401, np.uint8))
        with pytest.raises(CorruptFrameError, match="an external payload came with it"):
            decode(frame, 0, external)
        with pytest.raises(CorruptFrameError, match="no external payload came with it"):
            decode(inside)
        for end in range(len(inside)):
            with pytest.raises(TruncatedFrameError):
                decode(inside[:end], 0, external)
