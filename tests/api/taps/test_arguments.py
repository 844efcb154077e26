"""The other arguments of taps: their effects, refused values, and the messages."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest

import hostcallback as hcb
from recorder import Recorder


def test_result_is_returned_instead_of_the_argument(rec: Recorder) -> None:
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


FUNCTIONS: list[Callable[..., Any]] = [
    lambda: None,
    lambda v: None,
    lambda v, site: None,
    lambda v, site=1: None,
    lambda v, device: None,
    lambda v, device=1, *, index: None,
    lambda v, /, site, *, transforms: None,
    lambda v, site, /: None,
    lambda *values: None,
    lambda *values, site, device=0: None,
    lambda v, **kwargs: None,
    lambda site, v=0: None,
    print,
    functools.partial(lambda a, v, site: None, 1),
]


@pytest.mark.parametrize("kwargs", [{}, {"site": 1}, {"other": 1}, {"site": 1, "other": 2}, {"device": 1}])
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_tap_function_is_refused_if_the_call_would_not_bind(number: int, kwargs: dict[str, Any]) -> None:
    function = FUNCTIONS[number]
    signature = inspect.signature(function)
    named = {
        name: 0
        for name in ("transforms", "device", "index")
        if (parameter := signature.parameters.get(name)) is not None
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and parameter.default is inspect.Parameter.empty
    }
    try:
        signature.bind(None, **{**named, **kwargs})
    except TypeError:
        with pytest.raises(TypeError, match=r"hcb\.id_tap (calls|passes)"):
            hcb.id_tap(function, 1.0, **kwargs)
    else:
        hcb.id_tap(function, 1.0, **kwargs)
    hcb.barrier_wait()


async def _coroutine(value: Any) -> None:
    return None


async def _asynchronous_generator(value: Any) -> Any:
    yield value


def _generator(value: Any) -> Any:
    yield value


ASYNC: list[Callable[..., Any]] = [
    _coroutine,
    _asynchronous_generator,
    _generator,
    types.coroutine(_generator),
]
if sys.version_info >= (3, 12):
    ASYNC.append(inspect.markcoroutinefunction(lambda value: None))


@pytest.mark.parametrize("number", range(len(ASYNC)))
def test_a_function_whose_call_would_not_run_is_refused(number: int) -> None:
    with pytest.raises(TypeError, match=r"the (async|generator) function"):
        hcb.id_tap(ASYNC[number], 1.0)


def test_a_tap_function_that_is_not_callable_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"hcb.id_tap takes a function .* got float 3.0: call hcb.id_tap\(tap_func, arg\)"
    ):
        hcb.id_tap(3.0, print)  # type: ignore[arg-type]


def test_an_output_stream_without_write_is_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a write\(str\) method, got str 'log.txt'"):
        hcb.id_print(1.0, output_stream="log.txt")  # type: ignore[arg-type]


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostcallback.lifecycle import receivers as transport

    monkeypatch.setenv("HOSTCALLBACK_TRANSPORT", "pigeon")
    with pytest.raises(
        ValueError, match=r"HOSTCALLBACK_TRANSPORT='pigeon': expected 'native', 'callback' or nothing"
    ):
        transport.use_native.__wrapped__("cpu")


@pytest.mark.parametrize("function", [hcb.clear_stop, hcb.stop_on_signals])
def test_a_function_without_arguments_says_so(function: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"0 positional .*: call hcb\.{function.__name__}\(\), at .*test_argum"
    ):
        function("SIGTERM")


def test_a_loop_with_too_many_positional_arguments_is_told_those_that_it_takes() -> None:
    with pytest.raises(
        TypeError,
        match=r"hcb\.scan\(f, init, xs, length, reverse, unroll, progress=\.\.\.\), at .*test_argum",
    ):
        hcb.scan(lambda c, x: (c, x), 0, None, 3, False, 1, True)  # type: ignore[misc]
