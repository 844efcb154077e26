"""A watched function is the function: results, gradients, arguments; and which of its operations are watched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from watching import errors_of, line_of

import hostcallback as hcb
from transforming import Jit

X = jnp.linspace(0.5, 3.0, 12).reshape(3, 4)


def recurrent(x: Any) -> Any:
    def step(c, y):
        c = jnp.tanh(c * 0.9 + y)
        return c, lax.cond(jnp.sum(c) > 1, jnp.exp, jnp.sin, c)

    c, ys = lax.scan(step, jnp.zeros(4), x)
    return jnp.sum(ys) + jnp.sum(jax.checkpoint(lambda c: jnp.log(c + 2))(c))


def network(x: Any) -> Any:
    weights = jnp.ones((4, 4)) * 0.3
    hidden = jax.nn.relu(x @ weights + 0.1)
    return jnp.mean(jax.nn.log_softmax(jax.nn.gelu(hidden @ weights)) ** 2)


def loop(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: jnp.sqrt(c + i) * 1.1, jnp.sum(x))


PROGRAMS = [
    pytest.param(recurrent, marks=pytest.mark.slow),
    pytest.param(network, marks=pytest.mark.slow),
    loop,
]


def assert_same(watched: Any, plain: Any, *, ulps: int) -> None:
    for x, y in zip(jax.tree.leaves(watched), jax.tree.leaves(plain), strict=True):
        assert (x.dtype, x.weak_type) == (y.dtype, y.weak_type)
        np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), maxulp=ulps)


@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS, ids=["recurrent", "network", "loop"])
def test_results_and_gradients_are_the_same_to_the_bit(f: Callable[[Any], Any]) -> None:
    watch = hcb.watch_nonfinite
    assert_same(watch(f)(X), f(X), ulps=0)
    gradient = jax.grad(f)(X)
    assert_same(jax.grad(watch(f))(X), gradient, ulps=0)
    assert_same(watch(jax.grad(f))(X), gradient, ulps=0)


@pytest.mark.parametrize("features", [hcb.watch_nonfinite, functools.partial(hcb.capsule, nonfinite=True)])
def test_the_test_of_a_quotient_does_not_change_it(features: Callable[..., Any], tmp_path: Path) -> None:
    def quotient(x: Any, by: Any) -> Any:
        return x / by

    x, by = jnp.linspace(-1, 1, 64), jnp.float32(0.7368112)
    plain = jax.jit(quotient)(x, by)
    context = features() if features is hcb.watch_nonfinite else features(tmp_path)
    with context:
        tested = jax.jit(quotient)(x, by)
    assert_same(tested, plain, ulps=0)


@pytest.mark.users_compilation
@pytest.mark.slow
@pytest.mark.parametrize("f", PROGRAMS, ids=["recurrent", "network", "loop"])
def test_compiled_results_and_gradients_are_the_same_and_nothing_is_sent(f: Callable[[Any], Any]) -> None:
    # XLA may fuse the same operations otherwise, and contract a product and a sum here that it does not there.
    watch, jit = hcb.watch_nonfinite, hcb.jit
    with hcb.outfeed_receiver() as receiver:
        assert_same(jit(watch(f))(X), jit(f)(X), ulps=4)
        assert_same(jit(jax.vmap(watch(f)))(X[None]), jit(jax.vmap(f))(X[None]), ulps=4)
        watched, plain = (jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(X) for f in (watch(f), f))
        assert_same(watched, plain, ulps=4)
        gradient = jit(jax.grad(f))(X)
        assert_same(jit(jax.grad(watch(f)))(X), gradient, ulps=64)
        assert_same(jit(watch(jax.grad(f)))(X), gradient, ulps=64)
    assert sum(device.delivered for device in receiver.stats) == 0


def test_integers_and_keys_are_ignored(jit: Jit) -> None:
    def f(key, n):
        key, other = jax.random.split(key)
        return key, jax.random.normal(other, (2,)), n // 0 * 2, n > 1

    key = jax.random.key(0)
    n = jnp.arange(3)
    watched = []
    assert not errors_of(lambda: watched.append(jit(hcb.watch_nonfinite(f))(key, n)))
    for a, b in zip(watched[0], jit(f)(key, n), strict=True):
        is_key = a.dtype == key.dtype
        assert jnp.array_equal(*map(jax.random.key_data, (a, b))) if is_key else jnp.array_equal(a, b)


def test_a_function_without_floats(jit: Jit) -> None:
    assert int(jit(hcb.watch_nonfinite(lambda n: n * 2 + 1))(jnp.int32(3))) == 7
    assert jit(hcb.watch_nonfinite(lambda: jnp.int32(3)))() == 3


def test_non_array_arguments_are_passed_on() -> None:
    def f(x, times, *, mode, options=None):
        for _ in range(times):
            x = options["function"](x) if mode == "call" else x
        return {"x": x, "mode": mode, "times": times}

    watched = hcb.watch_nonfinite(f)
    result = watched(jnp.float32(16), 2, mode="call", options={"function": jnp.sqrt})
    assert (float(result["x"]), result["mode"], result["times"]) == (2.0, "call", 2)
    assert watched.__name__ == "f"


def test_static_arguments_of_jit_stay_static() -> None:
    def power(x, n):
        return x**n if n > 1 else x

    assert float(jax.jit(hcb.watch_nonfinite(power), static_argnums=1)(jnp.float32(3), 2)) == 9


def test_a_closed_over_tracer_is_not_an_argument() -> None:
    def f(x):
        return hcb.watch_nonfinite(lambda y: jnp.log(x) + y)(jnp.float32(1))

    assert jnp.isfinite(jax.grad(f)(2.0))
    (error,) = errors_of(lambda: jax.jit(f)(-1.0))
    assert error.primitive == "log"


def scoped(x: Any) -> Any:
    with jax.named_scope("encoder"):
        x = jnp.log(x - 10)  # encoder
    with jax.named_scope("decoder"):
        with jax.named_scope("attention"):
            y = jnp.sqrt(-X)  # attention
    return jnp.sum(y) + jnp.sum(x)


@pytest.mark.parametrize(
    ("where", "primitives"),
    [
        (None, ["log", "sqrt"]),
        ("encoder", ["log"]),
        ("attention", ["sqrt"]),
        ("decoder/attention", ["sqrt"]),
        ("code", []),
        ("test_as_without.py", ["log", "sqrt"]),
        ("watch/test_as_without.py", ["log", "sqrt"]),
        ("without.py", []),
        (lambda operation: operation.primitive == "sqrt", ["sqrt"]),
        (lambda operation: operation.source_line.line == line_of(__file__, "encoder"), ["log"]),
        (lambda operation: operation.backward, []),
    ],
)
def test_where_selects(where: Any, primitives: list[str]) -> None:
    watched = hcb.watch_nonfinite(scoped, where=where)
    assert [error.primitive for error in errors_of(lambda: jax.jit(watched)(X))] == primitives


def test_where_sees_the_scopes_of_a_gradient_without_its_transformations() -> None:
    seen = []

    def where(operation):
        seen.append(operation)
        return False

    errors_of(lambda: jax.jit(hcb.watch_nonfinite(jax.grad(scoped), where=where, mode="every"))(X))
    assert {operation.scope for operation in seen} >= {"encoder"}
    assert not any("(" in operation.scope for operation in seen)
    assert any(operation.backward for operation in seen)
    assert all(operation.dtype == np.float32 for operation in seen)


def test_non_functions_and_empty_selections_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"(?s)takes a function, got .*watch_nonfinite\(f\)\(x\).*test_as_without.py"
    ):
        hcb.watch_nonfinite(X)
    with pytest.raises(TypeError, match=r"where=3 is of type int, expected None, the name of a scope"):
        hcb.watch_nonfinite(scoped, where=3)


def test_a_selection_that_matches_nothing_is_told_of_once(caplog: Any) -> None:
    step = hcb.watch_nonfinite(jax.jit(scoped), where="attnetion")
    for _ in range(2):
        step(X)
    with hcb.watch_nonfinite(where="scoped.py"):
        jax.jit(lambda x: jnp.log(x) + 1)(X)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" reports")[0] for text in told] == [
        "watch_nonfinite(where='attnetion')", "watch_nonfinite(where='scoped.py')",
    ]  # fmt: skip
    assert "compiled in scoped: none has such a named scope or file" in told[0]


def test_a_step_that_returns_a_constant_too_is_watched_and_held(tmp_path: Any) -> None:
    def step(x: Any) -> Any:
        return jnp.log(x), 0.25

    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(step))(jnp.float32(-1)))
    assert error.primitive == "log"
    (error,) = errors_of(lambda: hcb.capsule(jax.jit(step), tmp_path, nonfinite=True)(jnp.float32(-1)))
    assert error.primitive == "log"


def test_the_diagnosis_repeats_no_tap_of_a_nested_function_or_a_loop_condition() -> None:
    seen: list[tuple[str, int]] = []

    @jax.jit
    def nested(i: Any, x: Any) -> Any:
        hcb.id_tap(lambda i: seen.append(("body", int(i))), i)
        return jnp.log(x - 1) + x

    def goes_on(state: Any) -> Any:
        hcb.id_tap(lambda i: seen.append(("condition", int(i))), state[0])
        return state[0] < 2

    def f(x: Any) -> Any:
        return lax.while_loop(goes_on, lambda state: (state[0] + 1, nested(*state)), (0, x))[1]

    watched = jax.jit(hcb.watch_nonfinite(f))
    (error,) = errors_of(lambda: watched(jnp.zeros(2)))
    assert "log: 2 NaN and 0 infinite values" in str(error)
    assert sorted(seen) == [("body", 0), ("body", 1), ("condition", 0), ("condition", 1), ("condition", 2)]


def test_the_diagnosis_repeats_no_callback_of_a_nested_function() -> None:
    calls: list[Any] = []

    def host(x: Any) -> Any:
        calls.append(x)
        return np.asarray(x)

    @jax.jit
    def nested(x: Any) -> Any:
        return jnp.log(io_callback(host, jax.ShapeDtypeStruct((2,), jnp.float32), x) - 1)

    watched = jax.jit(
        hcb.watch_nonfinite(
            lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, nested(s[1])), (0, x))[1]
        )
    )
    (error,) = errors_of(lambda: jax.block_until_ready(watched(jnp.zeros(2))))
    assert "would repeat io_callback" in str(error)
    assert len(calls) == 2
