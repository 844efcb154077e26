"""The drop-in's `call`, with the cases of host_callback 0.4.34's own tests."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hostcallback import host_callback as hcb
from transforming import Jit


def shape(*dimensions: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, np.float32)


def test_the_result_arrives_on_the_device(jit: Jit) -> None:
    arg = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    fun = jit(lambda x: 3 * (1 + hcb.call(lambda x: 2 * x, x + 1, result_shape=x)))
    np.testing.assert_array_equal(fun(arg), 3 * (1 + 2 * (arg + 1)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_kept(dtype: str) -> None:
    arg = jnp.arange(6).reshape(2, 3).astype(dtype)
    found = jax.jit(lambda x: hcb.call(lambda x: x[::-1], x, result_shape=x))(arg)
    assert found.dtype == arg.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(arg)[::-1])


def test_pytrees_go_and_come(jit: Jit) -> None:
    fun = jit(lambda x: hcb.call(lambda args: args[::-1], (x, x + 1), result_shape=(x, x)))
    assert [float(x) for x in fun(1.0)] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("arg", "result"),
    [
        pytest.param((), np.ones(2, np.float32), id="no argument"),
        pytest.param(np.ones((2, 0), np.float32), np.ones(2, np.float32), id="empty argument"),
        pytest.param(np.float32(1), np.ones((2, 0), np.float32), id="empty result"),
        pytest.param(
            (np.ones((2, 0), np.float32), np.float32(1)),
            (np.ones((2, 0), np.float32), np.ones(1, np.float32), np.ones(0, np.float32)),
            id="empty arrays among others",
        ),
    ],
)
def test_arguments_and_results_may_be_empty(arg: Any, result: Any) -> None:
    def host(got: Any) -> Any:
        jax.tree.map(np.testing.assert_array_equal, got, arg)
        return result

    shapes = jax.tree.map(lambda r: shape(*r.shape), result)
    found = jax.jit(lambda: hcb.call(host, arg, result_shape=shapes))()
    jax.tree.map(np.testing.assert_array_equal, found, result)


@pytest.mark.parametrize("nothing", [None, ()])
def test_a_function_without_result_is_called_too(nothing: Any, jit: Jit) -> None:
    seen = []

    def host(x: Any) -> Any:
        seen.append(float(x))
        return nothing

    def fun(x: Any) -> Any:
        assert hcb.call(host, x, result_shape=nothing) == nothing
        return x

    jit(fun)(3.0)
    hcb.barrier_wait()
    assert seen == [3.0]


def test_the_result_may_be_described_by_numbers_and_returned_as_one() -> None:
    assert float(jax.jit(lambda x: hcb.call(lambda x: 0.5, x, result_shape=1.0))(1.0)) == 0.5


def test_numpys_64_bit_results_are_narrowed_as_everywhere_in_jax() -> None:
    found = hcb.call(
        lambda x: np.float64(0.5), 1.0, result_shape=jax.ShapeDtypeStruct((), np.dtype("float64"))
    )
    assert (found.dtype, float(found)) == (np.float32, 0.5)


def test_calls_in_loops_and_branches(jit: Jit) -> None:
    def product(x: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            return lax.cond(
                i % 2 == 1,
                lambda total: hcb.call(lambda args: args[0] * args[1], (total, i), result_shape=total),
                lambda total: total,
                total,
            )

        return lax.fori_loop(0, 8, body, x)

    assert int(jit(product)(jnp.int32(2))) == 2 * 1 * 3 * 5 * 7

    def total(xs: Any) -> Any:
        return lax.scan(
            lambda c, x: (c + hcb.call(lambda x: 10 * x, x, result_shape=x), None), jnp.int32(0), xs
        )[0]

    assert int(jit(total)(jnp.arange(5, dtype=jnp.int32))) == 100


def test_calls_keep_their_order_among_taps() -> None:
    out = io.StringIO()

    def log(name: str) -> Callable[[Any], Any]:
        def host(x: Any) -> Any:
            out.write(f"{name} {x}\n")
            return x

        return host

    def fun(x: Any) -> Any:
        hcb.id_print(x, output_stream=out)
        x = hcb.call(log("first"), x + 1, result_shape=x)
        hcb.id_print(x, output_stream=out)
        return hcb.call(log("second"), x + 1, result_shape=x)

    jax.jit(fun)(jnp.int32(0))
    hcb.barrier_wait()
    assert out.getvalue() == "0\nfirst 1\n1\nsecond 2\n"


def test_the_device_is_passed_only_if_asked_for(jit: Jit) -> None:
    given = []

    def host(x: Any, device: Any = "none given") -> Any:
        given.append(device)
        return x

    jit(lambda x: hcb.call(host, x, result_shape=x))(1.0).block_until_ready()
    jit(lambda x: hcb.call(host, x, result_shape=x, call_with_device=True))(1.0).block_until_ready()
    assert given == ["none given", jax.devices()[0]]


def test_each_device_of_a_pmap_calls_for_itself() -> None:
    devices = jax.local_devices()[:2]
    given = {}

    def host(x: Any, *, device: Any) -> Any:
        given[device] = int(x)
        return x * np.int32(3)

    fun = jax.pmap(lambda x: hcb.call(host, x * 2, result_shape=x, call_with_device=True), devices=devices)
    assert fun(jnp.arange(2, dtype=jnp.int32)).tolist() == [0, 6]
    assert given == {devices[0]: 0, devices[1]: 2}


def test_vmap_works_with_the_pure_flavor_only() -> None:
    seen = []

    def host(x: Any) -> Any:
        seen.append(float(x))
        return 2 * x

    def fun(x: Any, flavor: hcb.CallbackFlavor) -> Any:
        return hcb.call(host, x, result_shape=x, callback_flavor=flavor)

    pure = jax.vmap(lambda x: fun(x, hcb.CallbackFlavor.PURE))
    assert pure(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
    assert sorted(seen) == [0.0, 1.0, 2.0]
    with pytest.raises(NotImplementedError, match=r"test_host_callback_call\.py"):
        jax.vmap(lambda x: fun(x, hcb.CallbackFlavor.IO_CALLBACK))(jnp.arange(3.0))


def test_the_debug_flavor_returns_nothing() -> None:
    with pytest.raises(NotImplementedError, match="only when the `result_shape` is None"):
        hcb.call(lambda x: x, 1.0, result_shape=1.0, callback_flavor=hcb.CallbackFlavor.DEBUG)
    assert hcb.call(lambda x: None, 1.0, callback_flavor=hcb.CallbackFlavor.DEBUG) is None


@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_differentiation_is_refused(differentiate: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError), match="custom_vjp"):
        differentiate(lambda x: hcb.call(np.sin, x, result_shape=x))(1.0)


@pytest.mark.parametrize("described", ["string", lambda x: x, {"a": object()}])
def test_a_result_shape_without_shapes_is_refused(described: Any) -> None:
    with pytest.raises(
        ValueError,
        match="The values must be either numeric scalars, or must have 'shape' and 'dtype' attributes",
    ):
        hcb.call(lambda x: x, 3.0, result_shape=described)


def test_a_non_function_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected a callable value, got 3"):
        hcb.call(3, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        pytest.param((1.0, 2.0), "PyTreeDef", id="another structure"),
        pytest.param(np.ones(2, np.float32), r"float32\[2\]", id="another shape"),
        pytest.param(np.int32(1), "int32", id="another dtype"),
    ],
)
def test_a_result_unlike_its_description_ends_the_program(result: Any, said: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.jit(lambda x: hcb.call(lambda x: result, x, result_shape=x))(1.0).block_until_ready()
    with pytest.raises(hcb.CallbackException, match=said):
        hcb.barrier_wait()


def test_an_exception_reaches_the_caller_the_log_and_the_barrier(caplog: pytest.LogCaptureFixture) -> None:
    def host(x: Any) -> Any:
        raise ValueError("user exception")

    def fun(x: Any) -> Any:
        return hcb.call(host, x, result_shape=x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="user exception"):
        jax.jit(fun)(3.0).block_until_ready()
    assert "Postponing exception raised in callback function" in caplog.text
    assert "ValueError: user exception" in caplog.text
    with pytest.raises(hcb.CallbackException, match="ValueError: user exception"):
        hcb.barrier_wait()
    # What runs after it is not affected.
    assert float(jax.jit(lambda x: hcb.call(lambda x: x + 1, x, result_shape=x))(3.0)) == 4.0
    hcb.barrier_wait()
