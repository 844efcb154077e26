"""Misuses of taps and calls are refused where they are traced, with the cure and the user's line."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

X = jax.ShapeDtypeStruct((3,), "float32")


async def coroutine(value: Any) -> None: ...


async def asynchronous_generator(value: Any) -> Any:
    yield


def generator(value: Any) -> Any:
    yield


class Asynchronous:
    async def __call__(self, value: Any) -> None: ...


@pytest.mark.parametrize(
    ("fmt", "value", "text"),
    [
        ("{:.2f}", jnp.ones(3), r"\{:.2f\} of hcb.print got an array of shape \(3,\) and dtype float32: '.2f' is for"),
        ("{x:.2f}", jnp.ones((2, 2)), r"\{x:.2f\} .* shape \(2, 2\).*an element, x\[0, 0\]"),
        ("{:d}", jnp.float32(1), r"\{:d\} of hcb.print got a float32: Unknown format code 'd'.* Write \{\}"),
        ("{:>10}", [1, 2], r"\{:>10\} of hcb.print got a list: unsupported format string"),
        ("{:.2f}", 1 + 2j, None),
        ("{0:.2f} {0:e}", jnp.bfloat16(1), None),
        ("{:5d}", jnp.int8(1), None),
        ("{!s:>40}", jnp.ones(3), None),
        ("{0.shape} {0.ndim:d}", jnp.ones(3), None),
    ],
)  # fmt: skip
def test_a_format_that_does_not_fit_its_value_is_refused_when_traced(
    fmt: str, value: Any, text: str | None
) -> None:
    def emit(value: Any) -> None:
        hcb.print(fmt, value) if "{x" not in fmt else hcb.print(fmt, x=value)

    if text is None:
        jax.jit(emit)(value)
        hcb.barrier_wait()
        return
    with pytest.raises((TypeError, ValueError), match=text + ".*test_misuses.py"):
        jax.jit(emit)(value)


class Method:
    def one(self, value: Any) -> None: ...

    def two(self, value: Any, other: Any) -> None: ...


def with_context(value: Any, *, transforms: Any, device: Any) -> None: ...


def keyword_only(*, value: Any) -> None: ...


def other_keyword(value: Any, *, threshold: float) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda: None,
            r"calls <lambda> with one value.*\(too many positional arguments\): give it a parameter",
        ),
        (lambda x, y: None, r"\(missing a required argument: 'y'\): .*lambda value: function\(\*value\)"),
        (
            Method().two,
            r"calls two with one value.*taken apart by lambda value: two\(\*value\), a dict by two\(\*\*value\)",
        ),
        (keyword_only, "give it a parameter for the value"),
        (
            other_keyword,
            r"required (keyword-only )?argument: 'threshold'.*keyword arguments, or give them defaults",
        ),
        (functools.partial(lambda a, b, value: None, 1), "missing a required argument: 'value'"),
        (lambda x, y=2: None, None),
        (lambda *values: None, None),
        (Method().one, None),
        (with_context, None),
        (functools.partial(lambda a, value: None, 1), None),
        (int, None),
        ([].append, None),
    ],
)
def test_a_tap_function_that_does_not_take_one_value_is_refused_when_traced(
    function: Any, text: str | None
) -> None:
    traced = jax.jit(lambda x: hcb.id_tap(function, x))
    if text is None:
        traced.lower(jnp.float32(1))
        return
    with pytest.raises(TypeError, match=text + ".*test_misuses.py"):
        traced(jnp.float32(1))
    with pytest.raises(TypeError, match=r"hcb\.call calls "):
        hcb.call(function, jnp.float32(1), result_shape=X)


def test_a_format_fits_the_elements_of_a_batch(capsys: Any) -> None:
    jax.jit(jax.vmap(lambda x: hcb.print("{:.2f}", x)))(jnp.arange(2.0))
    hcb.barrier_wait()
    assert capsys.readouterr().out == "0.00\n1.00\n"


@pytest.mark.parametrize(
    "function", [coroutine, Asynchronous(), functools.partial(coroutine), asynchronous_generator]
)
@pytest.mark.parametrize("emit", [hcb.tap, hcb.callback, functools.partial(hcb.call, result_shape=X)])
def test_an_async_function_is_refused(function: Any, emit: Any) -> None:
    with pytest.raises(TypeError, match=r"the async function .*run_coroutine_threadsafe.*test_misuses.py"):
        emit(function, 1.0)


def test_a_generator_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the generator function .* without yield, at .*test_misuses.py"):
        hcb.tap(generator, 1.0)


@pytest.mark.parametrize("function", [coroutine, generator])
def test_sinks_and_bound_functions_are_not_async(function: Any) -> None:
    with pytest.raises(TypeError, match=r"sinks got the"):
        hcb.outfeed_receiver(sinks=[function])
    with pytest.raises(TypeError, match=r"hcb.bind\('loss'\) got the"):
        hcb.bind("loss", function)


@pytest.mark.parametrize("switch", ["ordered", "tap_tangents", "batched", "python_scalars"])
def test_a_text_is_no_switch(switch: str) -> None:
    with pytest.raises(TypeError, match=rf"{switch}(=| is )'no', expected True"):
        hcb.tap(print, 1.0, **{switch: "no"})


@pytest.mark.parametrize("switch", ["ordered", "partitioned", "skip_format_check"])
def test_a_text_is_no_switch_of_print(switch: str) -> None:
    with pytest.raises(TypeError, match=rf"{switch}='yes', expected True or False, at .*test_misuses.py"):
        hcb.print("x {}", 1.0, **{switch: "yes"})


def test_a_call_needs_a_result_shape() -> None:
    with pytest.raises(
        TypeError, match=r"hcb.call needs result_shape=.*ShapeDtypeStruct\(x.shape.*test_misuses.py"
    ):
        hcb.call(lambda x: x, 1.0)


@pytest.mark.parametrize("shape", [(3, 4), [3], (3,)])
def test_a_bare_shape_is_no_result_shape(shape: Any) -> None:
    with pytest.raises(
        TypeError, match=r"is a bare shape, without a dtype: .*ShapeDtypeStruct.*test_misuses.py"
    ):
        hcb.call(lambda x: x, 1.0, result_shape=shape)


def test_a_call_and_a_tap_take_one_value() -> None:
    with pytest.raises(
        TypeError, match=r"hcb.call passes one argument .* got 2: put them into a tuple.*test_misuses"
    ):
        hcb.call(lambda x: x, 1.0, 2.0, result_shape=X)
    with pytest.raises(
        TypeError, match=r"hcb.tap sends one value, got 3: put them into a tuple.*test_misuses.py"
    ):
        hcb.tap(print, 1.0, 2.0, 3.0)  # type: ignore[call-overload]


async def awaited(value: Any) -> None: ...


@pytest.mark.parametrize(
    "misuse",
    [
        lambda tap: tap(print, 1.0, 2.0, 3.0),
        lambda tap: tap(3, 1.0),
        lambda tap: tap(lambda: None, 1.0),
        lambda tap: tap(awaited, 1.0),
    ],
)
def test_an_error_has_the_name_that_the_user_calls_the_tap_by(misuse: Any) -> None:
    with pytest.raises(TypeError, match=r"^hcb\.id_tap "):
        misuse(lambda *args: hcb.id_tap(*args))
    with pytest.raises(TypeError, match=r"^hcb\.tap "):
        misuse(lambda *args: hcb.tap(*args))


def test_a_barrier_in_traced_code_says_that_it_waits_there(caplog: pytest.LogCaptureFixture) -> None:
    @jax.jit
    def step(x: Any) -> Any:
        hcb.barrier_wait()
        return x + 1

    step(1.0)
    step(2.0)
    step(jnp.ones(3))
    hcb.barrier_wait()
    jax.grad(lambda x: (hcb.barrier_wait(), x * x)[1])(2.0)  # waits for what it has run
    (told,) = caplog.messages
    assert re.match(rf"hcb.barrier_wait\(\) at {__file__}:\d+ .*step\) is in traced code: it waits now", told)
    assert told.endswith("Call it outside of jit, after the call of the program")


def test_a_name_is_a_text() -> None:
    with pytest.raises(
        TypeError, match=r"a tap's name is a text, got int 3: name='loss', at .*test_misuses.py"
    ):
        hcb.tap(print, 1.0, name=3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "tap",
    [
        lambda name: hcb.tap(print, 1.0, name=name),
        lambda name: hcb.id_print(1.0, name=name),
        lambda name: hcb.print("a", name=name),
        lambda name: hcb.log("a", name=name),
        lambda name: hcb.callback(print, 1.0, name=name),
        lambda name: hcb.call(print, 1.0, result_shape=1.0, name=name),
        lambda name: hcb.check(jnp.array(True), "a", name=name),
        lambda name: hcb.metrics({"a": 1.0}, name=name),
        lambda name: hcb.observe(where="a", name=name),
    ],
)
def test_a_traced_value_is_no_name(tap: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a tap's name is a text, got \w*Tracer .*traced values.*test_misuses.py"
    ):
        jax.jit(tap)(1.0)
    with pytest.raises(TypeError, match=r"a tap's name is a text, got ndarray .*: name='loss', at .*misuses"):
        tap(np.zeros(2))
