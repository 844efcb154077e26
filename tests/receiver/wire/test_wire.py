"""The wire codec: every valid input round-trips, everything else raises the documented error."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as st

from checkout import ROOT
from receiver.wire import (
    HEADER,
    ArraySpec,
    CorruptFrameError,
    CorruptStreamError,
    Decoder,
    Flags,
    Header,
    TruncatedFrameError,
    UnsupportedDtypeError,
    UnsupportedVersionError,
    WireError,
    decode_frame,
    decode_header,
    decode_metadata,
    dtypes,
    encode_frame,
    encode_metadata,
    encode_prefix,
    frame_from_prefix,
    pack_subbyte,
    payload_layout,
    unpack_subbyte,
)
from receiver.wire.dtypes import WIRE_TYPES, WireType, dtype_of, wire_type_of

GOLDEN = ROOT / "tests" / "receiver" / "wire" / "golden"

Array = np.ndarray[Any, Any]
Result = tuple[int, int, int, int, int, int, list[Array]]
Decode = Callable[..., Result]


def _load_make_golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "tools" / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_golden"] = module
    spec.loader.exec_module(module)
    return module


CASES = _load_make_golden().cases()


def reference(buffer: Any, offset: int = 0, external: Any = None) -> Result:
    """`decode_frame` with the results that `Decoder.decode` has."""
    h, arrays = decode_frame(buffer, offset, external)
    return h.consumer_id, int(h.flags), h.seq, h.time_ns, h.run_id, h.device, arrays


def cold(buffer: Any, offset: int = 0, external: Any = None) -> Result:
    return Decoder().decode(buffer, offset, external)


def warm(*frames: bytes) -> Decode:
    """A decoder that has seen these frames, and so takes its fast way through their like."""
    decoder = Decoder()
    for frame in frames:
        decoder.decode(frame)
    return decoder.decode


def ways(frame: bytes) -> list[Decode]:
    """Every decoder there is, each of which must do the same; `frame` is a valid one."""
    return [reference, cold, warm(frame)]


def assert_same_array(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    bits = wire_type_of(expected.dtype).bits
    mask = (1 << min(bits, 8)) - 1  # how an int4 is stored in its byte is ml_dtypes' affair
    raw = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) & mask for a in (got, expected)]
    assert raw[0].tobytes() == raw[1].tobytes()


def assert_same_arrays(got: Sequence[Array], expected: Sequence[Array]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert_same_array(one, other)


def outcome(decode: Decode, *args: Any) -> Any:
    """What decoding gave, in a form that compares: an error's type, or everything that was decoded."""
    try:
        *fields, arrays = decode(*args)
    except WireError as error:
        assert type(error) is not WireError
        return type(error)
    return fields, [(str(a.dtype), a.shape, a.tobytes()) for a in arrays]


def edited(frame: bytes, **fields: int) -> bytes:
    """The frame with other header fields."""
    names = (
        "magic", "version", "flags", "consumer_id", "seq", "time_ns", "run_id", "device",
        "meta_bytes", "payload_bytes", "position",
    )  # fmt: skip
    values = dict(zip(names, HEADER.unpack_from(frame), strict=True)) | fields
    return HEADER.pack(*values.values()) + frame[HEADER.size :]


SCALAR = encode_frame([np.array(1.5, np.float32)], consumer_id=3)
MANY = encode_frame([np.full(3, i, np.float32) for i in range(60)], consumer_id=3)


# --- what is valid ---


@st.composite
def arrays_of_any_dtype(draw: st.DrawFn) -> Array:
    wire_type = draw(st.sampled_from(WIRE_TYPES))
    dtype = dtype_of(wire_type.code)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if draw(st.booleans()):
        shape = (*shape, draw(st.integers(15, 70)))  # on both sides of 64 bytes
    size = math.prod(shape)
    seed = draw(st.integers(0, 2**32 - 1))
    raw = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8)
    if wire_type.name == "bool":
        raw &= 1
    return (raw & ((1 << min(wire_type.bits, 8)) - 1)).view(dtype).reshape(shape)


header_fields = st.fixed_dictionaries(
    {
        "consumer_id": st.integers(0, 2**64 - 1),
        "flags": st.sampled_from([0, 1, 2, 3]),
        "seq": st.integers(0, 2**64 - 1),
        "time_ns": st.integers(-(2**63), 2**63 - 1),
        "run_id": st.integers(-(2**63), 2**63 - 1),
        "device": st.integers(-(2**31), 2**31 - 1),
        "position": st.integers(0, 2**64 - 1),
    }
)


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
def test_golden_bytes_decode_to_what_they_were_made_of(name: str) -> None:
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


def test_metadata_may_be_absent_where_there_are_no_arrays() -> None:
    frame = HEADER.pack(b"HCB", 1, Flags.END_OF_STREAM, 5, 0, 0, 0, 0, 0, 0, 0)
    for decode in ways(frame):
        for behind in (b"", SCALAR):
            consumer_id, flags, *_, arrays = decode(frame + behind)
            assert (consumer_id, flags, arrays) == (5, Flags.END_OF_STREAM, [])


# --- prefixes ---


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


# --- dtypes ---


@pytest.mark.parametrize("wire_type", WIRE_TYPES, ids=lambda t: t.name)
def test_codes_names_and_dtypes_belong_together(wire_type: WireType) -> None:
    dtype = dtype_of(wire_type.code)
    assert dtype.name == wire_type.name
    assert wire_type_of(dtype) is wire_type
    assert dtype.itemsize == wire_type.itemsize


def test_type_codes_are_those_of_xla() -> None:
    text = (ROOT / "receiver" / "native" / "third_party" / "xla" / "ffi" / "api" / "c_api.h").read_text(
        encoding="utf-8"
    )
    xla = {name: int(code) for name, code in re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", text)}
    assert {t.xla_name: t.code for t in WIRE_TYPES}.items() <= xla.items()
    assert xla.keys() - {t.xla_name for t in WIRE_TYPES} <= {"INVALID", "TOKEN"}


def test_every_dtype_of_jax_has_a_type_code() -> None:
    import jax.numpy as jnp

    members = [getattr(jnp, name) for name in dir(jnp)]
    names = {np.dtype(member).name for member in members if type(member) is type(jnp.float32)}
    assert {"bool", "int4", "bfloat16", "float4_e2m1fn", "float8_e4m3fn", "complex128"} <= names
    # No XLA FFI header has these; JAX 0.12 holds them on a CPU device, but compiles no arithmetic with them.
    assert names - dtypes.BY_NAME.keys() <= {"float6_e2m3fn", "float6_e3m2fn"}


@pytest.mark.parametrize("dtype", ["O", "U4", "M8[s]", "V3", "f4,i4", "g"])
def test_a_dtype_that_the_wire_lacks_is_refused_with_the_alternatives(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent; expected one of bool, int8.*convert"):
        encode_frame([np.zeros(2, dtype)], consumer_id=1)


@given(st.sampled_from([t for t in WIRE_TYPES if t.bits < 8]), st.data())
def test_subbyte_dtypes_are_packed_lowest_bits_first(wire_type: WireType, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 40))
    raw = data.draw(st.binary(min_size=size, max_size=size))
    dtype, bits = dtype_of(wire_type.code), wire_type.bits
    mask = (1 << bits) - 1
    array = (np.frombuffer(raw, np.uint8) & mask).view(dtype)
    # Python's integers say the same without numpy: one long number, element 0 lowest.
    number = sum((byte & mask) << (i * bits) for i, byte in enumerate(raw))
    expected = number.to_bytes(-(-size * bits // 8), "little")
    assert pack_subbyte(array).tobytes() == expected
    assert_same_array(unpack_subbyte(expected, dtype, (size,)), array)


@pytest.mark.parametrize("name", ["int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn"])
def test_unpacked_values_are_indistinguishable_from_ml_dtypes_own(name: str) -> None:
    wire_type = dtypes.BY_NAME[name]
    dtype = dtype_of(wire_type.code)
    codes = np.arange(1 << wire_type.bits, dtype=np.uint8)
    low = -(1 << (wire_type.bits - 1)) if name.startswith("int") else 0
    own = (codes.astype(int) + low).astype(dtype) if "int" in name else codes.view(dtype)
    back = unpack_subbyte(pack_subbyte(own), dtype, own.shape)
    assert back.tobytes() == own.tobytes()


def test_bits_behind_the_last_packed_element_are_ignored() -> None:
    assert unpack_subbyte(b"\xf7", dtype_of(22), (1,)).astype(int).tolist() == [7]


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dtype_of.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    dtype_of.cache_clear()


@pytest.mark.usefixtures("without_ml_dtypes")
def test_without_ml_dtypes_the_error_names_the_installation_and_other_frames_decode() -> None:
    frame = (GOLDEN / "dtype-16-bfloat16.bin").read_bytes()
    for decode in (reference, cold):
        with pytest.raises(UnsupportedDtypeError, match=r"bfloat16 needs .*: pip install ml_dtypes"):
            decode(frame)
        assert decode(SCALAR)[-1] == [1.5]


@pytest.mark.usefixtures("without_ml_dtypes")
def test_an_old_ml_dtypes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("ml_dtypes")
    old.__dict__["__version__"] = "0.1"
    monkeypatch.setitem(sys.modules, "ml_dtypes", old)
    with pytest.raises(UnsupportedDtypeError, match=r"newer ml_dtypes than the installed 0\.1: pip install"):
        cold((GOLDEN / "dtype-21-int4.bin").read_bytes())


def test_plain_dtypes_need_neither_ml_dtypes_nor_jax() -> None:
    code = (
        "import sys; from receiver.wire import *; import numpy as np\n"
        "frame = encode_frame([np.float32(2), np.arange(3)], consumer_id=1)\n"
        "print(Decoder().decode(frame)[-1], decode_metadata(encode_metadata([ArraySpec(21, (3,))])))\n"
        "assert not {'ml_dtypes', 'jax', 'jaxlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# --- metadata ---

specs_of_any_kind = st.lists(
    st.builds(
        ArraySpec,
        st.sampled_from([t.code for t in WIRE_TYPES]),
        st.lists(st.integers(0, 300), max_size=6).map(tuple),
    ),
    max_size=40,
)


@given(specs_of_any_kind)
def test_metadata_round_trip_and_are_what_msgpack_packs(specs: list[ArraySpec]) -> None:
    metadata = encode_metadata(specs)
    assert metadata == msgpack.packb([[s.type_code, list(s.shape)] for s in specs])
    assert decode_metadata(metadata) == tuple(specs)


@given(specs_of_any_kind)
def test_arrays_lie_in_order_aligned_and_as_dense_as_that_allows(specs: list[ArraySpec]) -> None:
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


# --- what is not valid ---


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
        ({"flags": 8}, CorruptFrameError, "PAD.*no message"),
        ({"flags": 1 << 30}, CorruptFrameError, "DISCARDED.*no message"),
        ({"flags": 1 << 31}, CorruptFrameError, "BUSY.*no message"),
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
        with pytest.raises(CorruptFrameError, match="not its shortest form, or more behind it"):
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
def test_lengths_that_lie_cost_no_memory(metadata: bytes, payload_bytes: int) -> None:
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


def test_a_stream_error_says_how_much_was_skipped() -> None:
    error = CorruptStreamError("a hole", 3)
    assert (str(error), error.skipped) == ("a hole", 3)
    assert isinstance(error, WireError)


# --- payloads outside the ring ---


def as_external(frame: bytes, arrays: Sequence[Array]) -> tuple[bytes, Array]:
    """What a ring holds of this frame if its payload travels outside, and the payload."""
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


# --- the decoder's memory ---


def test_a_decoder_forgets_the_oldest_metadata_and_goes_on() -> None:
    decoder = Decoder()
    for size in range(3000):
        assert decoder.decode(encode_frame([np.zeros(size, np.int8)], consumer_id=1))[-1][0].size == size
    assert len(decoder._known) == 1024  # the bound has no other observable effect than memory
    assert sum(map(len, decoder._known)) == decoder._known_bytes
    assert decoder.decode(SCALAR)[-1] == [1.5]


# Metadata of 69 bytes per array, so that few arrays make them long.
MANY_DIMENSIONS = np.zeros((1,) * 64, np.int8)


def test_a_decoder_bounds_the_bytes_it_remembers() -> None:
    decoder = Decoder()
    for count in range(4000, 4006):  # 270 KiB each
        decoder.decode(encode_frame([MANY_DIMENSIONS] * count, consumer_id=1))
        assert 0 < sum(map(len, decoder._known)) == decoder._known_bytes <= 1 << 20


def test_metadata_too_long_to_remember_still_decode() -> None:
    frame = encode_frame([MANY_DIMENSIONS] * 16000, consumer_id=1)
    assert decode_header(frame).meta_bytes > 1 << 20
    decoder = Decoder()
    for _ in range(2):
        assert len(decoder.decode(frame)[-1]) == 16000
    assert not decoder._known


# --- the native encoder ---


def native_encode(
    arrays: Sequence[Array],
    *,
    consumer_id: int,
    flags: int = 0,
    **stamp: int,
) -> bytes:
    """`encode_frame` by the native library."""
    from receiver.native import bindings as native_library

    library = native_library.load()
    prefix = encode_prefix(consumer_id, flags, [ArraySpec.of(a.dtype, a.shape) for a in arrays])
    # What XLA hands to the handler: C order, sub-byte dtypes packed.
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
    out = (ctypes.c_uint8 * needed).from_buffer(
        bytearray(b"\xaa" * needed)
    )  # so that padding must be written
    assert library.hcb_encode_frame(*parts, out, needed) == needed
    return bytes(out)


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
