"""Values that may be tapped: every dtype and shape, numbers, leaves that are not arrays; and refused values."""

from __future__ import annotations

import collections
import enum
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, TRANSPOSE, Jit, batch

# ---- Arrays ----------------------------------------------------------------------------------------------------------

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2",
    "uint4",
]  # fmt: skip


def make(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    values = np.arange(int(np.prod(shape, dtype=int))) % 2 + (
        np.arange(int(np.prod(shape, dtype=int))) % 3 == 0
    )
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.minimum(values, 1).reshape(shape).astype(kind)


def assert_same(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got.astype(np.complex128), expected.astype(np.complex128))
    assert got.flags.writeable


@pytest.mark.slow_variants(every=6)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0,), (2, 0, 3), (1000,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_arrives_as_it_was(dtype: str, shape: tuple[int, ...], rec: Recorder) -> None:
    with jax.enable_x64(True):
        value = make(dtype, shape)
        on_device = jnp.asarray(value)
        assert on_device.dtype == value.dtype
        hcb.jit(lambda x: hcb.id_tap(rec, x))(on_device).block_until_ready()
    hcb.barrier_wait()
    (got,) = rec.values
    assert_same(got, value)


@pytest.mark.slow_variants(every=6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_with_and_without_jit_and_batched(dtype: str, jit: Jit, rec: Recorder) -> None:
    with jax.enable_x64(True):
        value = make(dtype, (2, 3))
        jax.block_until_ready(jit(lambda x: hcb.id_tap(rec, x))(jnp.asarray(value)))
        jax.block_until_ready(jit(jax.vmap(lambda x: hcb.id_tap(rec, x), in_axes=1))(jnp.asarray(value)))
    hcb.barrier_wait()
    assert_same(rec.values[0], value)
    assert_same(rec.values[1], value)
    assert rec.transforms == [(), (batch(1),)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 100_000, 20_000_000])
def test_large_arrays_arrive_whole_and_are_the_taps_own(size: int, rec: Recorder) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x + 1).sum())
    for _ in range(3):
        f(jnp.arange(size, dtype=jnp.int32))
    hcb.barrier_wait()
    expected = np.arange(1, size + 1, dtype=np.int32)
    for value in rec.values:
        np.testing.assert_array_equal(value, expected)
        value += 1  # writable, and owned by this function alone
    assert not any(np.shares_memory(rec.values[0], v) for v in rec.values[1:])


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_zero_size_arrays_arrive_under_every_transformation(
    jit: Jit, shape: tuple[int, ...], rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        return (hcb.id_tap(rec, x) ** 2).sum()

    assert jit(jax.grad(f))(jnp.zeros(shape)).shape == shape
    jit(jax.vmap(f))(jnp.zeros((4, *shape)))
    jit(lambda x: lax.scan(lambda c, _: (hcb.id_tap(rec, c), None), x, None, length=2)[0])(jnp.zeros(shape))
    hcb.barrier_wait()
    assert [value.shape for value in rec.values] == [shape, shape, (4, *shape), shape, shape]
    assert rec.transforms == [(), (JVP, TRANSPOSE), (batch(0),), (), ()]


def test_integers_and_booleans_are_tapped_next_to_differentiated_values(jit: Jit, rec: Recorder) -> None:
    def f(x: Any, n: Any, flag: Any) -> Any:
        x, n, flag = hcb.id_tap(rec, (x, n, flag))
        return jnp.where(flag, x * n, 0.0)

    assert float(jit(jax.grad(f))(2.0, jnp.int32(3), jnp.array(True))) == 3.0
    hcb.barrier_wait()
    (x, n, flag), (ct, n_ct, flag_ct) = rec.values
    assert (x, n, flag) == (2.0, 3, True)
    assert (x.dtype, n.dtype, flag.dtype) == (np.float32, np.int32, np.bool_)
    assert ct == 3.0
    assert n_ct.dtype == flag_ct.dtype == jax.dtypes.float0
    assert rec.transforms == [(), (JVP, TRANSPOSE)]


def test_a_function_of_integers_alone_is_tapped_once_under_grad(jit: Jit, rec: Recorder) -> None:
    gradient = jit(jax.grad(lambda n: hcb.id_tap(rec, n) * 1.5, allow_int=True))(jnp.int32(4))
    assert gradient.dtype == jax.dtypes.float0
    hcb.barrier_wait()
    assert rec.values == [4]
    assert rec.transforms == [()]


def test_tangents_of_integers_can_be_tapped_themselves(jit: Jit, rec: Recorder) -> None:
    @jax.custom_jvp
    def f(x: Any, n: Any) -> Any:
        return x * n

    @f.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        x_dot, n_dot = hcb.id_tap(rec, tangents)
        assert n_dot.dtype == jax.dtypes.float0
        return primals[0] * primals[1], x_dot * primals[1]

    n_dot = np.zeros(2, jax.dtypes.float0)
    jit(lambda x, n: jax.jvp(f, (x, n), (x, n_dot)))(jnp.ones(2), jnp.arange(2))
    hcb.barrier_wait()
    ((x_dot, n_dot),) = rec.values
    np.testing.assert_array_equal(x_dot, [1, 1])
    assert (n_dot.dtype, n_dot.shape) == (jax.dtypes.float0, (2,))


# ---- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [True, 3, 2.5, 1 + 2j])
def test_python_numbers_arrive_as_arrays_and_come_back_as_they_were(
    jit: Jit, number: Any, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, {"x": x, "number": number})
        assert out["number"] is number  # a trace could not branch on an array
        return out["x"]

    jit(f)(1.0)
    jit(jax.vmap(f))(jnp.arange(2.0))
    jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    for value in (rec.values[0], rec.values[1], rec.values[2]):
        assert isinstance(value["number"], np.ndarray)
        assert value["number"] == number
        assert value["number"].shape == ()
    assert rec.transforms[1] == (batch(None, 0),)


def test_a_numpy_scalar_arrives_as_an_array_and_becomes_one(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, (x, np.float32(0.5), np.int8(3), np.bool_(True)))
        return out

    results = jit(f)(1.0)[1:]
    hcb.barrier_wait()
    assert [out.dtype for out in results] == [np.float32, np.int8, np.bool_]
    assert not any(jax.typeof(out).weak_type for out in results)
    assert [value.dtype for value in rec.values[0][1:]] == [np.float32, np.int8, np.bool_]
    assert [value.item() for value in rec.values[0][1:]] == [0.5, 3, True]


def test_weak_types_are_kept(jit: Jit, rec: Recorder) -> None:
    def types(weak: Any, strong: Any) -> Any:
        weak, strong = weak + 1, strong + 1
        seen.append([jax.typeof(x).weak_type for x in hcb.id_tap(rec, (weak, strong))])
        seen.append([jax.typeof(x).weak_type for x in (weak, strong)])
        return weak * strong

    seen: list[Any] = []
    strong = jnp.float32(1.0)
    jit(types)(1.0, strong)
    jit(jax.grad(types))(1.0, strong)
    jit(lambda x: jax.vmap(types, in_axes=(None, 0))(1.0, x))(jnp.ones(2))
    hcb.barrier_wait()
    assert seen[0::2] == seen[1::2] == [[True, False]] * 3


# ---- Leaves that are not arrays --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Mode(enum.IntEnum):
    TRAIN = 1


class Plain:
    def method(self) -> None: ...


STATIC = {
    "function": lambda x: x,
    "builtin function": len,
    "jitted function": jax.nn.relu,
    "bound method": Plain().method,
    "partial": functools.partial(jnp.sum, axis=0),
    "class": Plain,
    "class with __jax_array__": type("A", (), {"__jax_array__": lambda self: jnp.zeros(1)}),
    "string": "relu",
    "numpy string": np.str_("relu"),
    "bytes": b"relu",
    "dtype": np.dtype("float32"),
    "scalar type": jnp.bfloat16,
    "enum member": Colour.RED,
    "integer enum member": Mode.TRAIN,
    "object": object(),
    "set": {1, 2},
    "module": np,
    "shape": jax.ShapeDtypeStruct((2,), np.float32),
    "compiled pattern": re.compile("a+"),
}


def returns_its_leaf(rec: Recorder, leaf: Any) -> Callable[[Any], Any]:
    """A function that taps a value with a leaf which is no array, and checks what the tap returns for it."""

    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, [leaf, {"x": x, "leaf": leaf}, None])
        assert out[0] is leaf
        assert out[1]["leaf"] is leaf
        assert out[2] is None
        return out[1]["x"] ** 2

    return f


@pytest.mark.parametrize("kind", STATIC)
def test_a_non_array_leaf_comes_back_in_its_place_and_is_delivered(
    jit: Jit, kind: str, rec: Recorder
) -> None:
    leaf = STATIC[kind]
    assert float(jit(returns_its_leaf(rec, leaf))(2.0)) == 4.0
    hcb.barrier_wait()
    ((first, second, third),) = rec.values
    assert first is second["leaf"] is leaf
    assert third is None


@pytest.mark.parametrize("kind", ["function", "string", "object"])
def test_a_non_array_leaf_is_the_same_under_transformations(jit: Jit, kind: str, rec: Recorder) -> None:
    leaf = STATIC[kind]
    f = returns_its_leaf(rec, leaf)
    assert float(jit(f)(2.0)) == 4.0
    assert float(jit(jax.grad(f))(2.0)) == 4.0
    jit(jax.vmap(f))(jnp.arange(2.0))
    jit(lambda x: jax.jvp(f, (x,), (x,)))(2.0)
    jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])(2.0)
    hcb.barrier_wait()
    assert len(rec) == 8
    for first, second, third in rec.values:
        assert first is leaf
        assert second["leaf"] is leaf
        assert third is None
    assert rec.transforms == [
        (), (), (JVP, TRANSPOSE), (batch(0),), (), (JVP,), (), (),
    ]  # fmt: skip
    np.testing.assert_array_equal([v[1]["x"] for v in rec.values[-2:]], [2.0, 4.0])


def test_a_pytree_comes_back_in_its_structure(jit: Jit, rec: Recorder) -> None:
    Point = collections.namedtuple("Point", "x y")

    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, {"a": (x, None), "p": Point(x, "y"), "n": [x + 1, 2], "empty": ((), [], {})})
        assert out["p"].y == "y"
        assert out["empty"] == ((), [], {})
        return out["a"][0] + out["n"][1] + out["p"].x

    assert float(jit(f)(1.0)) == 4.0
    hcb.barrier_wait()
    (got,) = rec.values
    assert list(got) == ["a", "empty", "n", "p"]
    assert got["a"] == (1.0, None)
    assert got["p"] == Point(1.0, "y")
    assert isinstance(got["p"], Point)
    assert got["n"] == [2.0, 2]
    assert got["empty"] == ((), [], {})


def test_a_tap_without_arrays_fires_each_time(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, "tick", result=c), None), x, None, length=3)[0]

    jit(jax.grad(f))(1.0)
    hcb.barrier_wait()
    assert [v for v, t in zip(rec.values, rec.transforms, strict=True) if t == ()] == ["tick"] * 3


def test_taps_on_one_line_that_differ_in_a_static_leaf_are_separate(jit: Jit, rec: Recorder) -> None:
    configs = [Config(), Config(), "a", "b", Mode.TRAIN, np.dtype("int8"), np.dtype("int16")]

    def f(x: Any) -> Any:
        for config in configs:
            x = hcb.id_tap(rec, (config, x))[1] + 1
        return x

    g = jit(f)
    g(0.0)
    g(10.0)
    hcb.barrier_wait()
    assert [value[0] for value in rec.values] == configs * 2
    assert [float(value[1]) for value in rec.values] == [*range(7), *range(10, 17)]


class Layer:
    """A pytree node with an array and a field that belongs to its structure."""

    def __init__(self, weight: Any, field: Any) -> None:
        self.weight = weight
        self.field = field


jax.tree_util.register_pytree_node(
    Layer, lambda layer: ((layer.weight,), layer.field), lambda field, children: Layer(*children, field)
)


delivered: list[Any] = []


def deliver(value: Any) -> None:
    """Captures nothing, so that only the structure distinguishes its taps."""
    delivered.append(value)


class Config:
    """Prints like every other."""

    def __repr__(self) -> str:
        return "Config()"


@pytest.mark.parametrize("kind", ["functions", "objects"])
def test_taps_on_one_line_whose_structures_print_alike_are_separate(jit: Jit, kind: str) -> None:
    def scaled(by: float) -> Callable[[Any], Any]:
        return lambda x: x * by

    fields = [scaled(2.0), scaled(3.0)] if kind == "functions" else [Config(), Config()]

    def f(x: Any) -> Any:
        for field in (*fields, fields[0]):
            layer = hcb.id_tap(deliver, Layer(x, field))
            assert layer.field is field
            x = layer.weight + 1
        return x

    delivered.clear()
    assert float(jit(f)(1.0)) == 4.0
    hcb.barrier_wait()
    assert [value.field for value in delivered] == [*fields, fields[0]]
    assert [float(value.weight) for value in delivered] == [1.0, 2.0, 3.0]


def test_a_structure_that_cannot_be_hashed_is_tapped_all_the_same(jit: Jit, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, Layer(x, ["a list"])).weight

    jit(f)(1.0)
    jit(f)(2.0)
    hcb.barrier_wait()
    assert [(float(v.weight), v.field) for v in rec.values] == [(1.0, ["a list"]), (2.0, ["a list"])]


def test_an_object_with_jax_array_arrives_as_its_array(jit: Jit, rec: Recorder) -> None:
    class Quantised:
        def __init__(self, values: Any, scale: float) -> None:
            self.values, self.scale = values, scale

        def __jax_array__(self) -> Any:
            return self.values * self.scale

    def f(x: Any) -> Any:
        out = hcb.id_tap(rec, {"q": Quantised(x, 0.5)})
        return (out["q"] ** 2).sum()

    np.testing.assert_array_equal(jit(jax.grad(f))(jnp.arange(3.0)), [0.0, 0.5, 1.0])
    jit(jax.vmap(f))(jnp.ones((2, 3)))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0]["q"], [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(rec.values[1]["q"], [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(rec.values[2]["q"], np.full((2, 3), 0.5))
    assert rec.transforms == [(), (JVP, TRANSPOSE), (batch(0),)]


# ---- Refused values --------------------------------------------------------------------------------------------------


class Tensor:
    """An array of another library."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.zeros(3)


@pytest.mark.parametrize(
    ("bad", "cure"),
    [
        (np.array(["text"]), "convert it to a numeric dtype, or pass it as a keyword argument"),
        (np.array([object()]), "convert it to a numeric dtype, or pass it as a keyword argument"),
        (
            np.array(["2020-01-01"], "M8[D]"),
            "convert it to a numeric dtype, or pass it as a keyword argument",
        ),
        (np.datetime64("2020-01-01"), "convert it to a numeric dtype, or pass it as a keyword argument"),
        (Tensor(), "convert it with jax.numpy.asarray, or pass it as a keyword argument"),
    ],
)
def test_an_array_that_jax_cannot_take_is_refused_with_its_place_and_the_cure(
    jit: Jit, bad: Any, cure: str
) -> None:
    with pytest.raises(TypeError, match=rf"arg\['x'\]\[1\] is a .*{re.escape(cure)}"):
        jit(lambda x: hcb.id_tap(print, {"x": (x, bad)}))(1.0)
