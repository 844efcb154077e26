"""Damaged frames, and arbitrary bytes, raise the documented error in every decoder."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, strategies as st
from wire_frames import CASES, MANY, SCALAR, cold, edited, outcome, reference, warm, ways

from hostcallback.receiver.errors import (
    CorruptFrameError,
    CorruptStreamError,
    TruncatedFrameError,
    UnsupportedVersionError,
    WireError,
)
from hostcallback.receiver.wire.frame import HEADER, decode_header


@given(st.binary(max_size=300), st.integers(0, 300))
def test_arbitrary_bytes_raise_a_wire_error(data: bytes, offset: int) -> None:
    for decode in (reference, cold, warm(SCALAR, MANY)):
        assert outcome(decode, data, offset) in (
            TruncatedFrameError,
            CorruptFrameError,
            UnsupportedVersionError,
        )


@given(
    st.sampled_from([SCALAR, MANY, *(case.encode() for case in CASES.values())]),
    st.lists(st.tuples(st.integers(0, 199), st.integers(1, 255)), min_size=1, max_size=3),
    st.integers(0, 64),
)
def test_a_damaged_frame_decodes_or_raises_alike_everywhere(
    frame: bytes, damage: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(frame)
    for index, flip in damage:
        damaged[index % len(frame)] ^= flip
    for end in (len(frame), len(frame) - cut):
        expected = outcome(reference, damaged[:end])
        assert outcome(cold, damaged[:end]) == expected
        assert outcome(warm(frame, SCALAR), damaged[:end]) == expected


@given(
    st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 4, 8, 1 << 30, 1 << 31]),
    st.integers(0, 2**32 - 1) | st.integers(0, 70),
    st.integers(0, 2**64 - 1) | st.integers(0, 200),
    st.binary(max_size=300),
)
def test_a_header_with_arbitrary_lengths_decodes_or_raises_alike_everywhere(
    flags: int, meta_bytes: int, payload_bytes: int, rest: bytes
) -> None:
    frame = HEADER.pack(b"HCB", 1, flags, 1, 0, 0, 0, 0, meta_bytes, payload_bytes, 0) + rest
    expected = outcome(reference, frame)
    assert outcome(cold, frame) == expected
    assert outcome(warm(SCALAR, MANY), frame) == expected


@pytest.mark.parametrize("name", ["scalar", "several-arrays", "long-metadata", "zero-size", "end-of-stream"])
def test_a_frame_cut_anywhere_is_truncated(name: str) -> None:
    frame = CASES[name].encode()
    for decode in ways(frame):
        for end in range(len(frame)):
            with pytest.raises(TruncatedFrameError, match=f"has {end} bytes"):
                decode(frame[:end])


@pytest.mark.parametrize("frame", [SCALAR, MANY], ids=["scalar", "many"])
@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        ({"magic": b"HCX"}, CorruptFrameError, "start with b'HCX', expected b'HCB'"),
        ({"version": 2}, UnsupportedVersionError, "wire format 2, this package reads up to 1; upgrade"),
        ({"version": 255}, UnsupportedVersionError, "upgrade"),
        ({"version": 0}, CorruptFrameError, "wire format 0, expected 1"),
        ({"flags": 16}, CorruptFrameError, "does not know 0x10"),
        ({"flags": 1 << 29}, CorruptFrameError, "does not know"),
        ({"flags": 8}, CorruptFrameError, "PAD.*not a message"),
        ({"flags": 1 << 30}, CorruptFrameError, "DISCARDED.*not a message"),
        ({"flags": 1 << 31}, CorruptFrameError, "BUSY.*not a message"),
        ({"flags": 4}, CorruptFrameError, "EXTERNAL.*no external payload"),
        ({"payload_bytes": 0}, CorruptFrameError, "says 0 payload bytes, expected"),
        ({"payload_bytes": 5}, CorruptFrameError, "says 5 payload bytes, expected"),
        ({"payload_bytes": 2**64 - 1}, CorruptFrameError, "payload bytes, expected"),
        ({"meta_bytes": 2**32 - 1}, TruncatedFrameError, "its metadata needs"),
        ({"meta_bytes": 1}, CorruptFrameError, "nonzero padding"),
    ],
)
def test_each_damage_has_its_error(
    frame: bytes, edit: dict[str, int], error: type[WireError], message: str
) -> None:
    for decode in ways(frame):
        with pytest.raises(error, match=message):
            decode(edited(frame, **edit))


@pytest.mark.parametrize("frame", [SCALAR, MANY], ids=["scalar", "many"])
def test_padding_does_not_count_as_metadata(frame: bytes) -> None:
    # Padded, both metadata are the same bytes.
    longer = edited(frame, meta_bytes=decode_header(frame).meta_bytes + 1)
    for decode in ways(frame):
        with pytest.raises(CorruptFrameError, match="not its shortest form, or followed by other bytes"):
            decode(longer)


def test_padding_behind_metadata_must_be_zero() -> None:
    frame = bytearray(SCALAR)
    frame[64 + 63] = 1
    for decode in ways(SCALAR):
        with pytest.raises(CorruptFrameError, match="nonzero padding"):
            decode(frame)


def test_a_negative_offset_is_the_callers_mistake() -> None:
    for decode in ways(SCALAR):
        for offset in (-1, -64, -len(SCALAR), -1000):
            with pytest.raises(ValueError, match="expected 0 or more"):
                decode(SCALAR, offset)


def _nested(depth: int, claimed: int) -> bytes:
    return (b"\xdd" + claimed.to_bytes(4, "big")) * depth


@pytest.mark.parametrize(
    "metadata",
    [
        _nested(1, 2**32 - 1),
        _nested(500, 2**16),
        _nested(5000, 2**20),
        b"\x91" + _nested(100, 60),
        b"\x91" + _nested(500, 2500),
        b"\x91\x92\x0b" + _nested(1, 2**32 - 1),
        b"\xdf\xff\xff\xff\xff",
        b"\x91\xdf\xff\xff\xff\xff",
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\xdb\xff\xff\xff\xff",
        b"\x91\xc9\xff\xff\xff\xff\x01",
        b"\x91\x92\x0b\x91\xce\xff\xff\xff\xff",  # float32[2**32 - 1] in a frame of a few bytes
        b"\x91\x92\x15\x91\xce\xff\xff\xff\xff",  # int4, the same
    ],
)
@pytest.mark.parametrize("payload_bytes", [0, 4 * (2**32 - 1), 2**31])
def test_false_lengths_cost_no_memory(metadata: bytes, payload_bytes: int) -> None:
    padded = metadata.ljust(-(-len(metadata) // 64) * 64, b"\0")
    header = HEADER.pack(b"HCB", 1, 0, 1, 0, 0, 0, 0, len(metadata), payload_bytes, 0)
    frame = header + padded + bytes(64)
    tracemalloc.start()
    try:
        for decode in (reference, cold, warm(SCALAR)):
            assert outcome(decode, frame) in (CorruptFrameError, TruncatedFrameError)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_error_has_the_number_of_skipped_bytes() -> None:
    error = CorruptStreamError("a hole", 3)
    assert (str(error), error.skipped) == ("a hole", 3)
    assert isinstance(error, WireError)
