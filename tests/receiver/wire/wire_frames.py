"""Frames, and every way to decode one: for the tests of the wire codec."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from checkout import ROOT
from hostcallback.receiver.errors import WireError
from hostcallback.receiver.wire.array_types import WIRE_TYPES, dtype_of, wire_type_of
from hostcallback.receiver.wire.decoder import Decoder, decode_frame
from hostcallback.receiver.wire.frame import HEADER, encode_frame

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
    """All decoders, each of which must do the same; `frame` is a valid one."""
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
    """Result of decoding, in a form that compares: an error's type, or every decoded value."""
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
