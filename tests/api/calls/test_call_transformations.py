"""`hcb.call` under vmap, differentiation, control flow and rematerialisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from transforming import Jit

VMAP_METHODS = ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]


class Host:
    """A host function that remembers the shapes it got."""

    def __init__(self) -> None:
        self.shapes: list[Any] = []
        self.transforms: list[Any] = []

    def __call__(self, arg: Any, *, transforms: Any) -> Any:
        x, y = arg
        self.shapes.append((x.shape, y.shape))
        self.transforms.append(transforms)
        return x + y


@pytest.mark.slow_variants
@pytest.mark.parametrize("method", VMAP_METHODS)
def test_vmap_matches_pure_callback(jit: Jit, method: str) -> None:
    ours, peer = Host(), Host()

    def f(x: Any, y: Any) -> Any:
        return hcb.call(ours, (x, y), result_shape=x, vmap_method=method)

    def g(x: Any, y: Any) -> Any:
        # JAX passes its own arrays; only their shapes matter here.
        return jax.pure_callback(lambda x, y: peer((np.asarray(x), np.asarray(y)), transforms=()), x, x, y,
                                 vmap_method=method)  # fmt: skip

    x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones(2)
    for axes in [(0, None), (0, 1)]:
        argument = y if axes[1] is None else jnp.arange(6.0).reshape(2, 3)
        out = jit(jax.vmap(f, in_axes=axes))(x, argument)
        np.testing.assert_array_equal(out, jax.jit(jax.vmap(g, in_axes=axes))(x, argument))
    hcb.barrier_wait()
    assert ours.shapes == peer.shapes


@pytest.mark.parametrize(
    ("method", "shapes", "transforms"),
    [
        ("sequential", [((), ())] * 6, [()] * 6),
        (
            "expand_dims",
            [((2, 3), (1, 3))],
            [(("batch", {"batch_dims": (0, 0)}), ("batch", {"batch_dims": (0, None)}))],
        ),
        (
            "broadcast_all",
            [((2, 3), (2, 3))],
            [(("batch", {"batch_dims": (0, 0)}), ("batch", {"batch_dims": (0, 0)}))],
        ),
    ],
)
def test_nested_vmap_puts_one_dimension_each_in_front(method: str, shapes: Any, transforms: Any) -> None:
    host = Host()
    f = jax.vmap(lambda x, y: hcb.call(host, (x, y), result_shape=x, vmap_method=method))
    f = hcb.jit(jax.vmap(f, in_axes=(0, None)))
    out = f(jnp.arange(6.0).reshape(2, 3), jnp.ones(3))
    np.testing.assert_array_equal(out, 1 + np.arange(6.0).reshape(2, 3))
    assert host.shapes == shapes
    assert host.transforms == transforms


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("method", VMAP_METHODS)
def test_a_batch_of_none_and_of_one(method: str, size: int) -> None:
    f = jax.vmap(lambda x: hcb.call(lambda x: x + 1, x, result_shape=x, vmap_method=method))
    np.testing.assert_array_equal(hcb.jit(f)(jnp.zeros((size, 2))), np.ones((size, 2)))


def test_vmap_without_a_method_lists_the_methods() -> None:
    f = jax.vmap(lambda x: hcb.call(np.cumsum, x, result_shape=x))
    with pytest.raises(
        NotImplementedError, match=r"call of cumsum at .*test_call_transformations\.py:\d+ .*vmap_method"
    ):
        f(jnp.ones((2, 3)))


def test_unbatched_values_need_no_method() -> None:
    f = jax.vmap(lambda x: x + hcb.call(lambda y: y, jnp.float32(1), result_shape=jnp.float32(0)))
    np.testing.assert_array_equal(hcb.jit(f)(jnp.arange(3.0)), [1, 2, 3])


def test_the_error_for_a_batched_result_of_the_wrong_shape_mentions_the_batch() -> None:
    f = jax.vmap(lambda x: hcb.call(lambda x: x[0], x, result_shape=x, vmap_method="expand_dims"))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"returned float32\[2\] as result, expected float32\[3, 2\].*vmap"
    ):
        jax.block_until_ready(hcb.jit(f)(jnp.ones((3, 2))))
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()


@pytest.mark.parametrize(
    "differentiate",
    [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,)), lambda f: lambda x: jax.linearize(f, x)],
    ids=["grad", "jvp", "linearize"],
)
def test_differentiating_names_the_line_and_the_cure(jit: Jit, differentiate: Any) -> None:
    def f(x: Any) -> Any:
        return hcb.call(np.sin, x * 2, result_shape=x)

    with pytest.raises(
        ValueError, match=r"call of sin at .*test_call_transformations\.py:\d+ .*jax\.custom_vjp"
    ):
        jit(differentiate(f))(1.0)


def test_code_outside_of_derivatives_may_call(jit: Jit) -> None:
    def f(x: Any, n: Any) -> Any:
        stopped = hcb.call(np.sin, lax.stop_gradient(x), result_shape=x)
        whole = hcb.call(lambda n: n + 1, n, result_shape=n)
        both = hcb.call(lambda a: a[0] * a[1], (lax.stop_gradient(x), whole), result_shape=x)
        return x**2 * stopped * whole * both

    x = 0.5
    found = jit(jax.grad(f))(x, 2)
    assert np.allclose(found, 2 * x * np.sin(x) * 3 * (3 * x))


def test_custom_vjp_may_call_forward_and_backward(jit: Jit) -> None:
    log: list[Any] = []

    def host(what: str, function: Any) -> Any:
        def run(x: Any) -> Any:
            log.append(what)
            return function(x)

        return run

    @jax.custom_vjp
    def sin(x: Any) -> Any:
        return hcb.call(host("primal", np.sin), x, result_shape=x)

    def forward(x: Any) -> Any:
        return hcb.call(host("forward", np.sin), x, result_shape=x), x

    def backward(x: Any, ct: Any) -> Any:
        return (ct * hcb.call(host("backward", np.cos), x, result_shape=x),)

    sin.defvjp(forward, backward)
    x = jnp.float32(0.3)
    assert np.allclose(jit(sin)(x), np.sin(0.3))
    value, gradient = jit(jax.value_and_grad(lambda x: sin(2 * x)))(x)
    assert np.allclose((value, gradient), (np.sin(0.6), 2 * np.cos(0.6)))
    hcb.barrier_wait()
    assert log == ["primal", "forward", "backward"]


def test_custom_jvp_may_call_in_a_scan() -> None:
    @jax.custom_jvp
    def sin(x: Any) -> Any:
        return hcb.call(np.sin, x, result_shape=x)

    @sin.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return sin(x), t * hcb.call(np.cos, x, result_shape=x)

    def f(x: Any, function: Any) -> Any:
        return lax.scan(lambda c, _: (function(c), None), x, None, 5)[0]

    x = jnp.float32(0.7)
    found = jax.jit(jax.grad(lambda x: f(x, sin)))(x)
    assert np.allclose(found, jax.grad(lambda x: f(x, jnp.sin))(x))


def test_recomputation_under_checkpoint_calls_once() -> None:
    calls: list[float] = []

    def host(x: Any) -> Any:
        calls.append(float(x))
        return x

    @jax.checkpoint
    def layer(x: Any) -> Any:
        return jnp.sin(x) * hcb.call(host, lax.stop_gradient(x), result_shape=x)

    found = jax.jit(jax.grad(lambda x: layer(x) ** 2))(jnp.float32(0.5))
    hcb.barrier_wait()
    assert np.allclose(found, 2 * 0.5 * np.sin(0.5) * 0.5 * np.cos(0.5))
    assert calls == [0.5]


def test_while_cond_switch_and_map() -> None:
    def double(x: Any) -> Any:
        return hcb.call(lambda x: 2 * x, x, result_shape=x)

    def positive(x: Any) -> Any:
        return hcb.call(lambda x: bool(x < 100), x, result_shape=jax.ShapeDtypeStruct((), bool))

    assert int(jax.jit(lambda x: lax.while_loop(positive, double, x))(jnp.int32(3))) == 192
    f = jax.jit(lambda p, x: lax.cond(p, double, lambda x: x, x))
    assert [int(f(p, jnp.int32(5))) for p in (True, False)] == [10, 5]
    g = jax.jit(lambda i, x: lax.switch(i, [lambda x: x, double, lambda x: double(double(x))], x))
    assert [int(g(i, jnp.int32(5))) for i in range(3)] == [5, 10, 20]
    assert jax.jit(lambda xs: lax.map(double, xs))(jnp.arange(4)).tolist() == [0, 2, 4, 6]


def test_typed_keys_reach_the_host_as_keys(jit: Jit) -> None:
    key = jax.random.key(3)
    out = jit(lambda k: hcb.call(lambda k: jax.random.uniform(k, (4,)), k, result_shape=jnp.zeros(4)))(key)
    np.testing.assert_array_equal(out, jax.random.uniform(key, (4,)))
