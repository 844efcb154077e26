"""Binds a callback of JAX as a tap or a call of this library."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from hostcallback import _jax_compat as compat
from hostcallback.primitives.call import emit_call
from hostcallback.primitives.tap import as_jax_array, bind_tap, template_of
from hostcallback.receiver.errors import CallResultError
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing import exact_integers
from hostcallback.tracing.leaves import is_key
from hostcallback.tracing.tap_spec import ON_ONE_DEVICE, callable_name, callback_options

Arrays = Literal["numpy", "jax"]
"""Kind of the arrays that callbacks get: new numpy arrays, or JAX arrays on the CPU as from JAX."""

PLATFORMS = ("cpu", "gpu", "cuda", "rocm")
"""Platforms whose callbacks are taken over. On others taps are Python callbacks too, and can do less."""


class StaysWithJaxError(Exception):
    """A callback is not taken over; the text has the reason."""


def take_over(name: str, args: Sequence[Any], params: dict[str, Any], arrays: Arrays) -> list[Any]:
    """Binds a callback of JAX as a tap or a call, and returns the results.

    Args:
        name: the public function of JAX, a key of `FUNCTIONS`.
        args: the equation's operands.
        params: the equation's parameters.
        arrays: kind of the arrays that the callback gets.

    Raises:
        StaysWithJaxError: JAX must execute the callback.
        Exception: an error of `bind_tap` or `emit_call` for arguments that cannot be sent.
    """
    _check_place()
    try:
        compat.check_callback_params(name, params)
    except LookupError as error:
        raise StaysWithJaxError(f"this JAX is not known: {error}") from error
    return FUNCTIONS[name](_as_sent_by_jax(name, args), arrays, **params)


def _as_sent_by_jax(name: str, args: Sequence[Any]) -> Sequence[Any]:
    # JAX lowers typed PRNG keys to their data, so its callbacks get uint32 arrays. Where it calls `jax.debug`'s outside
    # of compiled code, they get keys. It wraps the integers of numpy that a tap would send as they are.
    if name == "io_callback" or compat.is_staging():
        args = [jax.random.key_data(arg) if is_key(arg) else arg for arg in args]
    return [arg if exact_integers.wide_dtype(arg) is None else jnp.asarray(arg) for arg in args]


def _check_place() -> None:
    code = compat.tracing_for(sys._getframe(1))
    if code is not None:
        raise StaysWithJaxError(f"it is in {code}")
    platform = jax.default_backend()
    if platform not in PLATFORMS:
        raise StaysWithJaxError(f"programs run on {platform}, where taps are Python callbacks as well")


def _parts(callback: Any) -> tuple[Callable[..., Any], Any, Mapping[int, Any]]:
    try:
        return compat.callback_parts(callback)
    except LookupError as error:
        raise StaysWithJaxError(f"this JAX is not known: {error}") from error


def _callback(
    args: Sequence[Any], arrays: Arrays, *, callback: Any, effect: compat.Effect, partitioned: bool
) -> list[Any]:
    func, in_tree, static = _parts(callback)
    if compat.is_jaxs_own(func):
        raise StaysWithJaxError(
            "it is JAX's own, such as of jax.debug.breakpoint, and may hold the device up on purpose"
        )
    ordered = compat.is_ordered_debug_effect(effect)
    _emit_callback(func, _arguments(in_tree, args, static), arrays, ordered, partitioned=partitioned)
    return []


def _print(
    args: Sequence[Any],
    arrays: Arrays,
    *,
    fmt: str,
    ordered: bool,
    partitioned: bool,
    in_tree: PyTreeDef,
    static_args: Any,
    np_printoptions: Any,
    has_placeholders: bool,
    logging_record: Any = None,
) -> list[Any]:
    # The text is equal for both values of `arrays`.
    values, named = _arguments(in_tree, args, dict(static_args))
    if named and not has_placeholders:
        raise StaysWithJaxError("its text has no placeholders for the keyword arguments, which JAX refuses")
    template = replace(
        template_of(fmt, values, named), has_placeholders=has_placeholders, printoptions=dict(np_printoptions)
    )
    options = callback_options("print" if logging_record is None else "log", ordered, partitioned)
    params, objects = template.params(), dict[str, Any](template=template)
    if logging_record is not None:
        objects["deliver"] = _LogRecords(logging_record)
        params |= {"logger": logging_record.name, "level": logging_record.levelno}
    identity = ("jax print", options.name, fmt, has_placeholders, str(template.printoptions))
    options = replace(options, kind=tap_descriptor.FORMAT, params=params, awaited=True)
    bind_tap((values, named), (), {}, Binding(objects=objects), identity=identity, options=options)
    return []


class _LogRecords:
    # Logs like `jax.debug.log`: the record has the traced line and the time of tracing.

    def __init__(self, record: Any) -> None:
        self._record = record

    def __call__(self, texts: list[str]) -> None:
        for text in texts:
            # A copy, because handlers change records, and this one is delivered many times.
            record = copy.copy(self._record)
            record.msg = text
            compat.debug_logger().handle(record)


def _io_callback(
    args: Sequence[Any],
    arrays: Arrays,
    *,
    callback: Any,
    result_avals: Sequence[compat.Aval],
    sharding: Any,
    ordered: bool,
) -> list[Any]:
    if sharding is not None:
        raise StaysWithJaxError("its sharding= says which device calls")
    func, in_tree, static = _parts(callback)
    arguments = _arguments(in_tree, args, static)
    if not result_avals:
        # The message keeps its order with the calls with results, also if the compiler partitions the program.
        checked = functools.partial(_call_without_result, func)
        params = {ON_ONE_DEVICE: True} if ordered else {}
        _emit_callback(func, arguments, arrays, ordered, params=params, called=checked)
        return []
    host_func = functools.partial(_leaves_of_call, func, arrays)
    announced = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in result_avals]
    options = replace(
        callback_options(callable_name(func), ordered, partitioned=False), params={ON_ONE_DEVICE: True}
    )
    return list(emit_call(host_func, arguments, {}, announced, "sequential", options, deferred=False))


def _leaves_of_call(func: Callable[..., Any], arrays: Arrays, arguments: Any) -> list[Any]:
    # JAX compares the leaves of the result with the announced ones, but not the structure.
    if arrays == "jax":
        with jax.default_device(_cpu()):
            args, kwargs = jax.tree.map(_as_from_jax, arguments)
            result = func(*args, **kwargs)
    else:
        args, kwargs = arguments
        result = func(*args, **kwargs)
    # A Python number has the dtype that it has in JAX, where it does not take the announced one.
    return [
        np.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf
        for leaf in jax.tree.leaves(result)
    ]


def _call_without_result(func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    result = func(*args, **kwargs)
    if result is not None and jax.tree.leaves(result):
        raise CallResultError(
            f"the callback of io_callback returned a value of type {type(result).__qualname__}, and no result was "
            "announced: make it return None, or announce the result in result_shape_dtypes"
        )


def _as_from_jax(leaf: Any) -> Any:
    return as_jax_array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _emit_callback(
    func: Callable[..., Any],
    arguments: Any,
    arrays: Arrays,
    ordered: bool,
    *,
    partitioned: bool = False,
    params: Mapping[str, Any] | None = None,
    called: Callable[..., Any] | None = None,
) -> None:
    # `called` is what calls `func`; without it the results of `func` are dropped, as by `jax.debug.callback`.
    called = called or func
    binding = Binding(called)
    if arrays == "jax":
        binding = Binding(functools.partial(_call_on_cpu, called), objects={"present": as_jax_array})
    params = params or {}
    options = replace(
        callback_options(callable_name(func), ordered, partitioned),
        kind=tap_descriptor.CALLBACK,
        params=params,
        awaited=True,
    )
    identity = ("jax callback", func, called is func, arrays, *params)
    bind_tap(arguments, (), {}, binding, identity=identity, options=options)


def _call_on_cpu(func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with jax.default_device(_cpu()):
        func(*args, **kwargs)


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _arguments(in_tree: PyTreeDef, dynamic: Sequence[Any], static: Mapping[int, Any]) -> Any:
    rest = iter(dynamic)
    count = len(dynamic) + len(static)
    leaves = [static[i] if i in static else next(rest) for i in range(count)]
    args, kwargs = jax.tree.unflatten(in_tree, leaves)
    return tuple(args), dict(kwargs)


FUNCTIONS: dict[str, Callable[..., list[Any]]] = {
    "jax.debug.callback": _callback,
    "jax.debug.print": _print,
    "io_callback": _io_callback,
}
"""The functions that take callbacks over, by the name of JAX's public function."""
