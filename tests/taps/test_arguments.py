"""What may be tapped, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import hostcallback as hcb
from recorder import Recorder

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2",
    "uint4",
]  # fmt: skip

JITS = [pytest.param(jax.jit, id="jax.jit"), pytest.param(hcb.jit, id="hcb.jit")]


def make(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    values = np.arange(int(np.prod(shape, dtype=int))) % 2 + (
        np.arange(int(np.prod(shape, dtype=int))) % 3 == 0
    )
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.minimum(values, 1).reshape(shape).astype(kind)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0,), (2, 0, 3), (1000,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_arrives_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    rec = Recorder()
    with jax.enable_x64(True):
        value = make(dtype, shape)
        try:
            on_device = jnp.asarray(value)
        except (TypeError, ValueError) as error:
            pytest.skip(f"this JAX cannot put {dtype} on a device: {error}")
        if on_device.dtype != value.dtype:
            pytest.skip(f"this JAX does not keep {dtype}")
        try:
            hcb.jit(lambda x: hcb.id_tap(rec, x))(on_device).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            pytest.skip(f"XLA:CPU cannot run {dtype}: {error}")
    hcb.barrier_wait()
    (got,) = rec.values
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    np.testing.assert_array_equal(got.astype(np.complex128), value.astype(np.complex128))
    assert got.flags.writeable


@pytest.mark.parametrize("jit", JITS)
def test_a_pytree_comes_back_in_its_structure_with_its_static_leaves(jit: Any) -> None:
    rec = Recorder()
    relu = jax.nn.relu

    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, {"a": (x, None), "f": relu, "name": "layer", "n": [x + 1, 2]})
        assert out["f"] is relu
        return out["a"][0] + out["n"][1]

    assert float(jit(f)(1.0)) == 3.0
    hcb.barrier_wait()
    (got,) = rec.values
    assert set(got) == {"a", "f", "name", "n"}
    assert got["f"] is relu
    assert got["name"] == "layer"
    assert got["a"][1] is None
    assert [float(v) for v in got["n"]] == [2.0, 2.0]


@pytest.mark.parametrize("jit", JITS)
def test_a_tap_without_arrays_fires_each_time(jit: Any) -> None:
    rec = Recorder()

    def f(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (hcb.id_tap(rec, "tick", result=c), None), x, None, length=3)[0]

    jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    assert [v for v, t in zip(rec.values, rec.transforms, strict=True) if t == ()] == ["tick"] * 3


@pytest.mark.parametrize("size", [100, 100_000, 20_000_000])
def test_large_arrays_arrive_whole_and_are_the_taps_own(size: int) -> None:
    rec = Recorder()
    f = hcb.jit(lambda x: hcb.id_tap(rec, x + 1).sum())
    for _ in range(3):
        f(jnp.arange(size, dtype=jnp.int32))
    hcb.barrier_wait()
    expected = np.arange(1, size + 1, dtype=np.int32)
    for value in rec.values:
        np.testing.assert_array_equal(value, expected)
        value += 1  # writable, and nobody else's
    assert not any(np.shares_memory(rec.values[0], v) for v in rec.values[1:])


def test_result_is_returned_instead_of_the_argument() -> None:
    rec = Recorder()
    assert float(hcb.jit(lambda x: hcb.id_tap(rec, x, result=x * 10))(2.0)) == 20.0
    hcb.barrier_wait()
    assert rec.floats() == [2.0]


def test_a_tap_function_gets_transforms_and_device_only_if_it_names_them() -> None:
    seen: list[Any] = []
    hcb.jit(lambda x: hcb.id_tap(lambda v: seen.append(float(v)), x))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, device: seen.append(device), x))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, transforms, **kw: seen.append((transforms, kw)), x, a=1))(1.0)
    hcb.jit(lambda x: hcb.id_tap(lambda v, device: seen.append(device), x, device="mine"))(1.0)
    hcb.barrier_wait()
    assert seen == [1.0, jax.devices()[0], ((), {"a": 1}), "mine"]


def test_a_tap_function_that_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match=r"id_tap takes a function .* got float 3.0: id_tap\(tap_func, arg\)"):
        hcb.id_tap(3.0, print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, np.array(["text"]), np.array([object()]), np.array(["2020-01-01"], "M8[D]")]
)
def test_what_jax_cannot_trace_is_refused_with_its_place_in_the_tree(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"arg\['x'\]\[1\] is a .*keyword argument"):
        hcb.id_tap(print, {"x": (1.0, bad)})


def test_an_output_stream_without_write_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a write\(str\) method, got str 'log.txt'"):
        hcb.id_print(1.0, output_stream="log.txt")  # type: ignore[arg-type]


def test_jit_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hostcallback.jit takes a function, got int 3"):
        hcb.jit(3)  # type: ignore[call-overload]


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostcallback import transport

    monkeypatch.setenv("HOSTCALLBACK_TRANSPORT", "pigeon")
    with pytest.raises(
        ValueError, match=r"HOSTCALLBACK_TRANSPORT='pigeon': expected 'native', 'callback' or nothing"
    ):
        transport.use_native.__wrapped__("cpu")


def test_a_traced_keyword_argument_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"the keyword argument 'step' of id_print is a traced value.*tapped pytree"
    ):
        jax.jit(lambda x: hcb.id_print(x, step=x + 1))(1.0)


def test_a_typed_key_is_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match=r"arg\['key'\] has dtype key<fry>.*jax.random.key_data"):
        hcb.id_tap(print, {"key": jax.random.key(0)})
