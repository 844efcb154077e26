"""The dtypes of the wire: codes, elements of less than a byte, and behaviour without ml_dtypes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from wire_frames import GOLDEN, SCALAR, assert_same_array, cold, reference

from checkout import ROOT
from hostcallback.receiver.errors import UnsupportedDtypeError
from hostcallback.receiver.wire import array_types
from hostcallback.receiver.wire.array_types import (
    WIRE_TYPES,
    WireType,
    dtype_of,
    pack_subbyte,
    unpack_subbyte,
    wire_type_of,
)
from hostcallback.receiver.wire.frame import encode_frame
from python_process import python_output


@pytest.mark.parametrize("wire_type", WIRE_TYPES, ids=lambda t: t.name)
def test_codes_names_and_dtypes_belong_together(wire_type: WireType) -> None:
    dtype = dtype_of(wire_type.code)
    assert dtype.name == wire_type.name
    assert wire_type_of(dtype) is wire_type
    assert dtype.itemsize == wire_type.itemsize


@pytest.mark.parametrize("wire_type", WIRE_TYPES, ids=lambda t: t.name)
def test_elements_have_the_bits_of_their_type(wire_type: WireType) -> None:
    dtype = dtype_of(wire_type.code)
    if hasattr(np, wire_type.name):
        assert wire_type.bits == 8 * dtype.itemsize
    else:
        info = ml_dtypes.iinfo if "int" in wire_type.name else ml_dtypes.finfo
        assert wire_type.bits == info(dtype).bits


def test_type_codes_match_xla() -> None:
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
    assert names - array_types.BY_NAME.keys() <= {"float6_e2m3fn", "float6_e3m2fn"}


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
    # Python's integers give the same without numpy: one long number, element 0 lowest.
    number = sum((byte & mask) << (i * bits) for i, byte in enumerate(raw))
    expected = number.to_bytes(-(-size * bits // 8), "little")
    assert pack_subbyte(array).tobytes() == expected
    assert_same_array(unpack_subbyte(expected, dtype, (size,)), array)


@pytest.mark.parametrize("name", ["int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn"])
def test_unpacked_values_are_indistinguishable_from_ml_dtypes_own(name: str) -> None:
    wire_type = array_types.BY_NAME[name]
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
        "import numpy as np, sys\n"
        "from hostcallback.receiver.wire.array_types import ArraySpec, decode_metadata, encode_metadata\n"
        "from hostcallback.receiver.wire.decoder import Decoder\n"
        "from hostcallback.receiver.wire.frame import encode_frame\n"
        "frame = encode_frame([np.float32(2), np.arange(3)], consumer_id=1)\n"
        "print(Decoder().decode(frame)[-1], decode_metadata(encode_metadata([ArraySpec(21, (3,))])))\n"
        "assert not {'ml_dtypes', 'jax', 'jaxlib'} & set(sys.modules)"
    )
    python_output("-c", code, cwd=ROOT, timeout_sec=60)
