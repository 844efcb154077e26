"""`mode="every"` reports what the other mode reports, and operations whose values reach no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from watching import errors_of, line_of

import hostcallback as hcb

Form = Callable[..., Any]
AROUND = pytest.param(lambda f, **options: hcb.watch_nonfinite(jax.jit(f), **options), id="around jit")
INSIDE = pytest.param(lambda f, **options: jax.jit(hcb.watch_nonfinite(f, **options)), id="inside jit")
BARE = pytest.param(hcb.watch_nonfinite, id="no jit")

X = jnp.array([3.0, 2.0, 0.5, 4.0])


def all_masked(x: Any) -> Any:
    return jax.nn.softmax(jnp.where(x > 10, x, -jnp.inf))  # all masked


def plus_nan(x: Any) -> Any:
    return x + jnp.nan  # plus nan


def doubled(x: Any) -> Any:
    return x * 2


def minus_itself(x: Any) -> Any:
    return x - x


def reports(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """The names of what is reported, and the lines of operations."""
    found = errors_of(run)
    return [(e.primitive, 0 if e.primitive.startswith("input") else e.source_line.line) for e in found]


@pytest.mark.parametrize("form", [AROUND, INSIDE])
@pytest.mark.parametrize(
    ("function", "x", "name", "mark"),
    [
        pytest.param(all_masked, X, "sub", "all masked", id="a NaN of masks"),
        pytest.param(plus_nan, X, "add", "plus nan", id="a constant NaN"),
        pytest.param(doubled, X.at[1].set(jnp.nan), "input x[1]", "", id="a NaN in an input"),
        pytest.param(minus_itself, X.at[1].set(jnp.inf), "input x[1]", "", id="an infinity in an input"),
    ],
)
def test_a_nan_in_a_result_is_reported_in_both_modes(
    function: Callable[[Any], Any], x: Any, name: str, mark: str, form: Form
) -> None:
    expected = [(name, line_of(__file__, mark) if mark else 0)]
    assert reports(lambda: form(function)(x)) == expected
    assert reports(lambda: form(function, mode="every")(x)) == expected


@pytest.mark.parametrize("function", [plus_nan, doubled])
def test_without_jit_both_modes_report_the_same(function: Callable[[Any], Any]) -> None:
    x = jnp.ones(7)  # of a shape that no other test has: there is one program of each operation and shape
    x = x.at[1].set(jnp.nan) if function is doubled else x
    expected = reports(lambda: hcb.watch_nonfinite(function)(x))
    assert expected
    assert reports(lambda: hcb.watch_nonfinite(function, mode="every")(x)) == expected


@pytest.mark.parametrize("form", [AROUND, INSIDE])
def test_what_reaches_no_result_is_reported_with_what_does(form: Form) -> None:
    def f(x):
        hidden = jnp.where(x > 1, jnp.log(x - 1), 0.0)  # hidden
        return hidden + jnp.sqrt(-x)  # not hidden

    expected = [("sqrt", line_of(__file__, "not hidden"))]
    assert set(reports(lambda: form(f)(X))) >= set(expected)
    expected = [("log", line_of(__file__, "hidden")), *expected]
    assert reports(lambda: form(f, mode="every")(X)) == expected


@pytest.mark.parametrize("form", [AROUND, INSIDE])
def test_a_hidden_value_in_a_long_loop_hides_no_result_of_a_later_iteration(form: Form) -> None:
    def f(x):
        def step(total, y):
            hidden = jnp.where(y > 50, jnp.log(y - 50), y)
            return total + hidden, jnp.sqrt(4000 - y)

        return lax.scan(step, 0.0, x)

    x = jnp.arange(4100.0) + 20
    (late,) = errors_of(lambda: form(f)(x + 31))
    assert (late.primitive, late.iteration) == ("sqrt", (3950,))
    early, late = errors_of(lambda: form(f, mode="every")(x))
    assert (early.primitive, early.iteration) == ("log", (0,))
    assert (late.primitive, late.iteration) == ("sqrt", (3981,))


@pytest.mark.parametrize("form", [AROUND, BARE])
def test_infinities_that_reach_no_result_are_not_reported(form: Form) -> None:
    def f(x, bias):
        weights = jax.nn.softmax(x + bias)
        nothing = jnp.full_like(x, -jnp.inf)
        return weights, jnp.exp(
            jnp.logaddexp(nothing, nothing)
        )  # has a NaN on the way, of two logarithms of zero

    bias = jnp.array([0.0, -jnp.inf, 0.0, 0.0])
    assert not errors_of(lambda: form(f, mode="every")(X, bias))


def test_nor_are_they_together_with_an_operation_that_fails() -> None:
    def f(x, bias):
        nothing = jnp.full_like(x, -jnp.inf)
        finite = jnp.exp(jnp.logaddexp(nothing, nothing)) + jax.nn.softmax(x + bias)
        return jnp.where(x > 1, jnp.log(x - 1), 0.0) + finite

    bias = jnp.array([0.0, -jnp.inf, 0.0, 0.0])
    (error,) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(f), mode="every")(X, bias))
    assert error.primitive == "log"


@pytest.mark.parametrize("form", [AROUND, INSIDE])
def test_a_selection_of_operations_leaves_the_inputs(form: Form) -> None:
    def f(x):
        with jax.named_scope("inner"):
            y = jnp.sqrt(x)
        return y, jnp.log(-x)

    for options in ({}, {"mode": "every"}):
        watched = form(f, where="inner", **options)
        assert not errors_of(lambda watched=watched: watched(X))
        (error,) = errors_of(lambda watched=watched: watched(X.at[2].set(jnp.nan)))
        assert error.primitive == "input x[2]"


def test_a_program_without_floating_point_results_is_tested() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x) > 0), mode="every")
    assert [name for name, _ in reports(lambda: step(-X))] == ["log"]


@pytest.mark.parametrize("mode", ["results", "every"])
def test_results_that_are_meant_to_be_infinite_use_up_no_walks_of_others(mode: Any) -> None:
    @jax.jit
    def step(x):
        return jnp.where(x > 1, x, -jnp.inf), jnp.sum(jnp.log(x))

    watched = hcb.watch_nonfinite(step, mode=mode)
    with hcb.error_collector(on_error="warn") as receiver:
        for _ in range(10):
            watched(X)
            hcb.barrier_wait()
        assert not receiver.failed_checks
        watched(-X)
    assert [check.name for check in receiver.failed_checks] == ["log"]
