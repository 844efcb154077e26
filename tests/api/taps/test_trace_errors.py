"""Errors while a program is traced name the line of the tap; and taps leak no tracers."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hostcallback as hcb
from recorder import Recorder
from transforming import Jit, no_jit


def next_line(count: int = 1) -> str:
    """The place `count` lines below the caller's, as errors name it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + count} "


def shown(error: BaseException) -> str:
    """The error as Python shows it, without its traceback."""
    return "".join(traceback.format_exception_only(error))


# ---- Errors ----------------------------------------------------------------------------------------------------------


def test_a_traced_keyword_argument_is_refused() -> None:
    place = next_line()
    f = jax.jit(lambda x: hcb.id_print(x, step=x + 1))
    with pytest.raises(
        TypeError, match=r"the keyword argument 'step' of id_print@.* is a traced value"
    ) as info:
        f(1.0)
    assert "tapped pytree" in str(info.value)
    assert place in str(info.value)
    with pytest.raises(TypeError, match="keyword argument 'step'") as info:
        hcb.id_print(jax.grad(lambda x: hcb.id_print(2.0, step={"a": x}, result=x))(1.0))
    assert "test_trace_errors.py" in str(info.value)


def test_a_leaf_that_cannot_be_sent_is_refused_with_the_line(jit: Jit) -> None:
    place = next_line()
    f = jit(lambda x: hcb.id_tap(print, {"x": x, "names": np.array(["a"])}))
    with pytest.raises(TypeError, match=r"arg\['names'\] is a numpy array of dtype <U1") as info:
        f(1.0)
    assert place in str(info.value)


def test_an_integer_that_is_too_large_is_refused_with_the_line(jit: Jit) -> None:
    place = next_line()
    f = jit(lambda x: hcb.id_tap(print, (x, 10**100)))
    with pytest.raises(OverflowError, match=r"arg\[1\] is a Python integer of more than 64 bits") as info:
        f(1.0)
    assert shown(info.value).count(place) == 1


def test_a_pytree_error_has_a_note_with_the_line() -> None:
    class Picky:
        def __init__(self, x: Any) -> None:
            if type(x) is not float:
                raise RuntimeError("a float, please")
            self.x = x

    jax.tree_util.register_pytree_node(Picky, lambda p: ([p.x, jnp.zeros(2)], None), lambda _, c: Picky(c))
    place = next_line()
    f = jax.jit(lambda x: hcb.id_tap(print, Picky(1.0), name="picky") and x)
    with pytest.raises(RuntimeError, match="a float, please") as info:
        f(1.0)
    assert f"This was raised in the tap picky at {place}" in shown(info.value)


# ---- Tracers that escaped --------------------------------------------------------------------------------------------


def escaped_tracers() -> dict[str, Any]:
    """A tracer that outlived its trace, of every kind."""
    kept: dict[str, Any] = {}

    def keep(name: str, x: Any) -> Any:
        kept[name] = x
        return x

    jax.jit(lambda x: keep("argument of a jit", x))(1.0)
    jax.jit(lambda x: keep("value in a jit", x + 1))(1.0)
    hcb.jit(lambda x: keep("value in an hcb.jit", x + 1))(1.0)
    jax.grad(lambda x: keep("value under grad", x * 2))(1.0)
    jax.jvp(lambda x: keep("value under jvp", x * 2), (1.0,), (1.0,))
    jax.vmap(lambda x: keep("value under vmap", x * 2))(jnp.ones(2))
    lax.scan(lambda c, _: (keep("carry of a scan", c), None), 1.0, None, length=2)
    lax.cond(True, lambda x: keep("value in a branch", x + 1), lambda x: x, 1.0)
    jax.jit(lambda x: keep("result of a tap", hcb.id_tap(lambda x: None, x)))(1.0)
    jax.jit(lambda: keep("reference", jax.new_ref(jnp.zeros(2)))[...])()
    jax.jit(lambda: keep("key", jax.random.key(0)))()
    return kept


def with_rule(f: Any) -> Any:
    """A function with a derivative rule that calls `f`."""
    function = jax.custom_jvp(lambda x: f() * x)
    function.defjvps(lambda t, out, x: t)
    return function


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize(
    "around",
    [
        pytest.param(jax.jit, id="jax.jit"),
        pytest.param(no_jit, id="no jit"),
        pytest.param(lambda f: lambda: jax.grad(lambda x: f())(1.0), id="grad"),
        pytest.param(lambda f: lambda: jax.vmap(lambda x: f())(jnp.ones(2)), id="vmap"),
        pytest.param(lambda f: lambda: lax.scan(lambda c, _: (f(), None), 1.0, None, length=2), id="scan"),
        pytest.param(
            lambda f: lambda: jax.jit(jax.grad(lambda x: jax.jit(f)()))(1.0), id="jit of grad of jit"
        ),
        pytest.param(lambda f: lambda: jax.vmap(with_rule(f))(jnp.ones(2)), id="custom_jvp in a vmap"),
    ],
)
def test_tapping_a_tracer_that_escaped_names_the_line(around: Jit) -> None:
    for kind, tracer in escaped_tracers().items():
        place = next_line()
        f = around(lambda tracer=tracer: hcb.id_tap(print, {"x": tracer}, result=1.0))
        with pytest.raises(jax.errors.UnexpectedTracerError) as info:
            f()
        assert f"This was raised in the tap print at {place}" in shown(info.value), kind


def test_tapping_a_tracer_of_a_program_in_a_function_with_a_rule_names_the_line() -> None:
    tracer = escaped_tracers()["value in a jit"]
    place = next_line()
    f = with_rule(lambda: hcb.id_tap(print, {"x": tracer}, result=1.0))
    with pytest.raises(jax.errors.UnexpectedTracerError) as info:
        jax.jit(f)(1.0)
    assert f"This was raised in the tap print at {place}" in shown(info.value)


@pytest.mark.slow
def test_tracers_of_the_traces_around_a_tap_have_not_escaped(rec: Recorder) -> None:
    def tap(*values: Any) -> Any:
        return hcb.id_tap(rec, values, tap_tangents=False)[0]

    @jax.custom_vjp
    def custom(x: Any, y: Any) -> Any:
        return x * y

    def forward(x: Any, y: Any) -> Any:
        return tap(x, y) * y, (x, y)

    def backward(residuals: Any, g: Any) -> Any:
        return tap(g, residuals), g

    custom.defvjp(forward, backward)

    @jax.custom_jvp
    def custom_too(x: Any) -> Any:
        return x * 2

    @custom_too.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        tap(primals, tangents)
        return primals[0] * 2, tangents[0] * 2

    def f(x: Any, y: Any) -> Any:
        def body(c: Any, z: Any) -> Any:
            inner = jax.jit(lambda w: tap(w, x, y, c, z))
            c = lax.cond(c > -1, lambda: tap(c, inner(z), x), lambda: c)
            return jax.checkpoint(lambda c: tap(jnp.sin(c), x, c))(c), custom(c, y)

        carry, ys = lax.scan(body, x, jnp.ones(2) * y)
        carry = lax.fori_loop(0, 2, lambda i, c: tap(c, i, x, ys), carry)
        _, transpose = jax.vjp(lambda y: tap(y * carry, x), y)
        _, linear = jax.linearize(lambda y: tap(y * carry, x), y)
        closed, consts = jax.closure_convert(lambda z: tap(z, x), y)
        return custom_too(carry) + jax.jit(lambda: tap(transpose(x)[0], linear(y), y, closed(y, *consts)))()

    jax.jit(jax.grad(f))(1.0, 2.0)
    jax.grad(f)(1.0, 2.0)
    hcb.jit(jax.vmap(jax.grad(f)))(jnp.ones(2), jnp.ones(2))
    jax.jit(jax.jacrev(jax.grad(f)))(1.0, 2.0)
    jax.jvp(jax.jit(jax.vmap(custom_too)), (jnp.ones(2),), (jnp.ones(2),))
    jax.hessian(lambda x: lax.scan(lambda c, _: (custom_too(tap(c, x)), None), x, None, length=2)[0])(1.0)
    jax.vmap(lambda x: jax.jit(jax.grad(lambda y: jax.vmap(lambda z: tap(x, y, z))(jnp.ones(2)).sum()))(x))(
        jnp.ones(2)
    )
    hcb.barrier_wait()
    assert len(rec) > 50


def test_jax_names_the_users_line_when_the_result_of_a_tap_escapes() -> None:
    escaped: list[Any] = []

    def f(x: Any) -> Any:
        escaped.append(hcb.id_tap(lambda x: None, x))
        return x

    place = next_line(-3).strip()
    jax.jit(f)(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError) as info:
        jnp.sin(escaped[0])
    created = re.search(r"was created on line (\S+) \((\S+)\)", str(info.value))
    assert created is not None
    assert created[1].startswith(place)
    assert created[2].endswith("f")


def test_a_compiled_program_names_the_users_line() -> None:
    place = next_line()
    f = jax.jit(lambda x: hcb.id_tap(lambda x: None, x))
    text = f.lower(1.0).as_text(debug_info=True)
    file, line = place.strip().rsplit(":", 1)
    assert f'loc("{file}":{line}' in text
    assert "emit.py" not in text


def test_a_tap_function_that_holds_a_tracer_is_reported_with_the_line() -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return hcb.id_tap(lambda value: print(value + y), x)

    place = next_line(-2)
    jax.jit(f)(1.0)
    with pytest.raises(hcb.TapFunctionException) as info:
        hcb.barrier_wait()
    (error,) = info.value.exceptions
    assert isinstance(error, jax.errors.UnexpectedTracerError)
    assert place in shown(error)


# ---- Leaks -----------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "a tap": lambda tap, x: tap(x).sum(),
    "a tap of a pytree": lambda tap, x: tap({"x": x, "n": 3, "f": jax.nn.relu, "o": PROGRAMS})["x"].sum(),
    "grad": lambda tap, x: jax.grad(lambda x: (tap(x) ** 2).sum())(x),
    "vmap": lambda tap, x: jax.vmap(lambda x: tap(x))(x),
    "scan": lambda tap, x: lax.scan(lambda c, _: (tap(c), None), x, None, length=3)[0],
    "key": lambda tap, x: x + jax.random.uniform(tap(jax.random.key(0))),
    "reference": lambda tap, x: x + tap(jax.new_ref(x))[...],
    "checkpoint": lambda tap, x: jax.grad(jax.checkpoint(lambda x: jnp.sin(tap(jnp.sin(x))).sum()))(x),
}


@pytest.mark.slow_variants(every=4)
@pytest.mark.parametrize("program", PROGRAMS)
def test_taps_leak_no_tracers(jit: Jit, program: str, rec: Recorder) -> None:
    with jax.checking_leaks():
        jit(lambda x: PROGRAMS[program](lambda value: hcb.id_tap(rec, value), x))(jnp.ones(2))
    hcb.barrier_wait()
    assert rec.values


@pytest.mark.slow
def test_a_leak_of_a_taps_result_is_found(jit: Jit) -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        return PROGRAMS["scan"](lambda value: kept.append(hcb.id_tap(lambda x: None, value)) or value, x)

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        jit(f)(jnp.ones(2))


@pytest.mark.slow
def test_where_jax_takes_its_own_bookkeeping_for_a_leak_taps_do_as_its_callbacks_do() -> None:
    # The partial evaluation of a scan (JAX 0.8 to 0.12) keeps a list of effects that refers to its tracers.
    def outcome(tap: Callable[[Any], Any]) -> bool:
        def step(c: Any, _: Any) -> Any:
            tap(c)
            return jnp.sin(c), None

        with jax.checking_leaks():
            try:
                jax.grad(lambda x: lax.scan(step, x, None, length=3)[0])(1.0)
            except Exception as error:
                assert "Leaked trace JaxprTrace" in str(error)
                return True
        return False

    assert outcome(lambda x: hcb.id_tap(lambda x: None, x)) == outcome(
        lambda x: jax.debug.callback(lambda x: None, x)
    )
