"""Every valid frame round-trips, and is the bytes that the golden files hold."""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import (
    CASES,
    GOLDEN,
    MANY,
    SCALAR,
    Array,
    arrays_of_any_dtype,
    assert_same_arrays,
    header_fields,
    outcome,
    reference,
    ways,
)

from checkout import ROOT
from hostcallback.receiver.wire.array_types import WIRE_TYPES, wire_type_of
from hostcallback.receiver.wire.decoder import Decoder, decode_frame
from hostcallback.receiver.wire.frame import HEADER, Flags, decode_header, encode_frame


@given(
    st.lists(arrays_of_any_dtype(), max_size=5), header_fields, st.integers(0, 200), st.binary(max_size=70)
)
def test_every_valid_frame_round_trips(
    arrays: list[Array], fields: dict[str, int], offset: int, behind: bytes
) -> None:
    frame = encode_frame(arrays, **fields)
    header, _ = decode_frame(frame)
    assert header.frame_bytes == len(frame)
    assert header.position == fields["position"]
    assert len(frame) % 64 == 0
    for decode in ways(frame):
        memory = bytearray(offset) + frame + behind
        *got, decoded = decode(memory, offset)
        assert got == [fields[k] for k in ("consumer_id", "flags", "seq", "time_ns", "run_id", "device")]
        memory[:] = bytes(len(memory))  # the ring is reused: nothing decoded may change
        assert_same_arrays(decoded, arrays)
        for array in decoded:
            assert array.flags.owndata
            assert array.flags.behaved
            assert array.flags.c_contiguous


@pytest.mark.parametrize("name", CASES)
def test_the_reference_encoder_reproduces_the_golden_bytes(name: str) -> None:
    assert CASES[name].encode() == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes_decode_to_their_source(name: str) -> None:
    frame = (GOLDEN / f"{name}.bin").read_bytes()
    for decode in ways(frame):
        *fields, arrays = decode(frame)
        assert fields == [
            CASES[name].header[k] for k in ("consumer_id", "flags", "seq", "time_ns", "run_id", "device")
        ]
        assert_same_arrays(arrays, CASES[name].arrays)


def test_there_is_a_golden_file_for_every_case_and_dtype_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)
    assert {wire_type_of(case.arrays[0].dtype) for case in CASES.values() if case.arrays} == set(WIRE_TYPES)


def test_a_frame_written_by_hand_from_the_specification() -> None:
    # Not made by any encoder: numbers and offsets are those of docs/wire-format.md.
    frame = bytearray(64 + 64 + 64)
    frame[0:4] = b"HCB\x01"
    struct.pack_into("<I", frame, 4, 1)
    struct.pack_into("<Q", frame, 8, 0xFEDCBA9876543210)
    struct.pack_into("<Q", frame, 16, 12)
    struct.pack_into("<q", frame, 24, 1_700_000_000_000_000_000)
    struct.pack_into("<q", frame, 32, -5)
    struct.pack_into("<i", frame, 40, 2048)
    struct.pack_into("<I", frame, 44, 8)
    struct.pack_into("<Q", frame, 48, 10)
    struct.pack_into("<Q", frame, 56, 640)
    frame[64:72] = bytes([0x92, 0x92, 21, 0x91, 3, 0x92, 3, 0x90])  # int4[3], int16 scalar
    frame[128:130] = bytes([0xF1, 0x07])  # 1, -1, 7
    struct.pack_into("<h", frame, 136, -2)
    for decode in ways(bytes(frame)):
        *fields, arrays = decode(bytes(frame))
        assert fields == [0xFEDCBA9876543210, 1, 12, 1_700_000_000_000_000_000, -5, 2048]
        assert arrays[0].astype(np.int8).tolist() == [1, -1, 7]
        assert arrays[1] == -2
        assert arrays[1].dtype == np.int16
    assert bytes(frame) == encode_frame(
        arrays,
        consumer_id=fields[0],
        flags=fields[1],
        seq=fields[2],
        time_ns=fields[3],
        run_id=fields[4],
        device=fields[5],
        position=640,
    )


def test_the_hexdump_in_the_documentation_is_the_golden_scalar() -> None:
    text = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    ([0-9a-f]{8})  ((?:[0-9a-f]{2} ){15}[0-9a-f]{2})", text, re.MULTILINE)
    dumped = bytearray(int(lines[-1][0], 16) + 16)
    for offset, octets in lines:
        dumped[int(offset, 16) : int(offset, 16) + 16] = bytes.fromhex(octets)
    assert bytes(dumped) == (GOLDEN / "scalar.bin").read_bytes()


def test_a_thousand_arrays_with_long_metadata() -> None:
    arrays = [np.array([i, -i], np.int32) for i in range(1000)]
    frame = encode_frame(arrays, consumer_id=1)
    assert decode_header(frame).meta_bytes > 4000
    for decode in ways(frame):
        assert_same_arrays(decode(frame)[-1], arrays)


@pytest.mark.parametrize("frame", [SCALAR, MANY], ids=["scalar", "many"])
@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda frame: memoryview(bytearray(frame)),
        lambda frame: np.frombuffer(frame, np.uint8),
        lambda frame: (ctypes.c_uint8 * len(frame)).from_buffer_copy(frame),
        lambda frame: memoryview((ctypes.c_uint8 * len(frame)).from_buffer_copy(frame)).cast("B"),
    ],
    ids=["bytes", "bytearray", "readonly view", "view", "numpy", "ctypes", "ctypes view"],
)
def test_any_buffer_of_bytes_can_be_decoded(make: Callable[[bytes], Any], frame: bytes) -> None:
    expected = outcome(reference, frame)
    for decode in ways(frame):
        assert outcome(decode, make(frame)) == expected


def test_mapped_memory_can_be_decoded_and_closed_afterwards() -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[64 : 64 + len(MANY)] = MANY
        results = [outcome(decode, memory, 64) for decode in ways(MANY)]
    # Closing would have failed if an array still looked into the mapping.
    assert results == [outcome(reference, MANY)] * 3


def test_a_stream_of_frames_is_walked_by_their_lengths() -> None:
    stream = b"".join(case.encode() for case in CASES.values())
    decoder = Decoder()
    offset = 0
    for case in CASES.values():
        assert_same_arrays(decoder.decode(stream, offset)[-1], case.arrays)
        offset += decode_header(stream, offset).frame_bytes
    assert offset == len(stream)


def test_metadata_may_be_absent_without_arrays() -> None:
    frame = HEADER.pack(b"HCB", 1, Flags.END_OF_STREAM, 5, 0, 0, 0, 0, 0, 0, 0)
    for decode in ways(frame):
        for behind in (b"", SCALAR):
            consumer_id, flags, *_, arrays = decode(frame + behind)
            assert (consumer_id, flags, arrays) == (5, Flags.END_OF_STREAM, [])
