"""A drop-in for `jax.experimental.host_callback` as of JAX 0.4.34: `from hostcallback import host_callback as hcb`.

Names, signatures and behaviour are that module's, as its own documentation describes them: primal values only under
autodiff, one batched message under vmap, `transforms` as a list that is passed by position, one tap per device under
pmap. `install()` puts it in that module's place, for packages that cannot be edited. Nothing here is deprecated, so no
deprecation warning is emitted. Taps also work where that module's did not
(shard_map, custom derivatives of every kind), and messages travel as those of `hostcallback.id_tap` do: threads, order
and waiting are documented there. docs/migrating.md lists every name, and what is different.
"""

from __future__ import annotations

import enum
import functools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import experimental

from hostcallback import _jax_compat as compat
from hostcallback.api import barrier
from hostcallback.api.call import call as host_call
from hostcallback.legacy import flags as legacy_flags
from hostcallback.legacy.outfeed_internals import missing_name_error
from hostcallback.primitives.bind import bind_tap
from hostcallback.receiver import errors
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Consumer, Message
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding, TapParts, make_sink
from hostcallback.receiver.sinks.host_callback import call_and_log, logging_failures, positional_tap_sink
from hostcallback.receiver.sinks.print import SupportsWrite
from hostcallback.receiver.wire import tap_kind
from hostcallback.sync import inflight
from hostcallback.tracing import leaves
from hostcallback.tracing.fingerprint import callable_name
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import TapOptions


class CallbackFlavor(enum.Enum):
    """Which of JAX's callbacks JAX 0.4.34 put in the place of its own ones when `JAX_HOST_CALLBACK_LEGACY` was off.

    Here they are all the same, but for `call`: only with `PURE` does it work under vmap.
    """

    IO_CALLBACK = 1
    PURE = 2
    DEBUG = 3


class CallbackException(Exception):
    """Callback functions raised. Its `__cause__` is the last exception, as it was raised.

    Attributes:
        group: every exception, with the tap, its source line and the device of each.
    """

    group: errors.TapFunctionException


TapFunctionException = CallbackException
"""The name that module had for it before."""


def id_tap(
    tap_func: Callable[..., Any],
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: Any,
) -> Any:
    """Sends `arg` to the host, where `tap_func(arg, transforms)` is called; an identity in the program.

    Order, threads and blocking are those of `hostcallback.id_tap`. What `tap_func` raises is logged, stops nothing,
    and is reported by `barrier_wait`.

    Args:
        tap_func: called with the pytree of numpy arrays and the list of transformations applied to the tap, such as
            `[]` or `[("batch", {"batch_dims": (0, None)})]`. Its result is ignored.
        arg: a pytree of arrays and numbers.
        result: what to return; `arg` if None. It is not sent.
        tap_with_device: whether `tap_func` also gets `device=`, the `jax.Device` that the value comes from.
        device_index: where the compiler partitions the program over several devices, the whole value arrives once, and
            `device` is the program's device with this index. Without effect in other programs.
        callback_flavor: accepted; taps of every flavor are the same.
        **kwargs: none; see Raises.

    Returns:
        `result`, or `arg` when it is None. It need not be used.

    Raises:
        TypeError: `tap_func` is not callable, a leaf of `arg` is nothing JAX can trace, or keyword arguments are left.
    """
    if kwargs:
        raise TypeError(
            "Support for **kwargs in ``id_tap`` has been removed. Instead, pre-apply keyword arguments, either by "
            f"using a closure or by passing ``functools.partial(tap_func, **kwargs)``. Got {', '.join(sorted(kwargs))}"
        )
    _check_callable(tap_func, "id_tap(tap_func, arg)")

    identity = ("host_callback.id_tap", tap_func, tap_with_device)
    options = _options(callable_name(tap_func), device_index)
    calls = functools.partial(positional_tap_sink, with_device=tap_with_device)
    return _tap(arg, result, {}, Binding(tap_func, calls=calls), identity, options)


def id_print(
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    output_stream: SupportsWrite | None = None,
    threshold: int | None = None,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: Any,
) -> Any:
    """Prints `arg` on the host; an identity in the program. See `id_tap`.

    First the keyword arguments on one line, sorted by key, with `device` and `transforms` among them where there are
    any: `device: cpu:0 transforms: [('batch', {'batch_dims': (0,)})] what: x`. Then the value: `( a b )`, `[ a b ]`,
    `{ key=a }`, arrays by `numpy.array2string`, on one line if that fits into 80 columns.

    Args:
        arg: as in `id_tap`.
        result: as in `id_tap`.
        tap_with_device: whether the device is printed.
        device_index: as in `id_tap`.
        output_stream: an object with `write(str)`, called once per message on receiver threads; `sys.stdout` if None.
        threshold: numpy's: arrays with more elements are summarised; None for numpy's setting.
        callback_flavor: as in `id_tap`.
        **kwargs: host values to print.

    Returns:
        `result`, or `arg` when it is None.

    Raises:
        TypeError: a leaf of `arg` is nothing JAX can trace, or a keyword argument is traced.
    """

    identity = ("host_callback.id_print", output_stream, threshold, tap_with_device)
    params = {"threshold": threshold, "with_device": tap_with_device}
    options = _options("id_print", device_index, kind=tap_kind.PRINT, params=params)
    binding = Binding(objects={"output_stream": output_stream})
    return _tap(arg, result, kwargs, binding, identity, options)


def call(
    callback_func: Callable[..., Any],
    arg: Any,
    *,
    result_shape: Any = None,
    call_with_device: bool = False,
    device_index: int = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
) -> Any:
    """Calls `callback_func(arg)` on the host and returns its result to the program, which waits for it.

    Order, threads and errors are those of `hostcallback.call`: what `callback_func` raises ends the program, is logged,
    and is reported by `barrier_wait`.

    Args:
        callback_func: called with the pytree of numpy arrays; returns a pytree of numpy arrays or numbers.
        arg: a pytree of arrays and numbers.
        result_shape: a pytree like the result, of numbers or of objects with `shape` and `dtype`. None or `()` for a
            function that returns that.
        call_with_device: whether `callback_func` also gets `device=`, the `jax.Device` that the call comes from.
        device_index: accepted; each device calls for itself, and in a program that the compiler partitions over several
            a call is refused.
        callback_flavor: with `PURE` vmap calls once per element; with the others vmap is refused.

    Returns:
        The result of `callback_func`, as arrays.

    Raises:
        TypeError: `callback_func` is not callable, or a leaf of `arg` is nothing JAX can trace.
        ValueError: `result_shape` holds something without shape or dtype; or, later, the call is differentiated (as
            there, `jax.custom_vjp` around it is the cure).
        NotImplementedError: the flavor is `DEBUG` and there is a result; or, later, the call is under vmap.
    """
    _check_callable(callback_func, "call(callback_func, arg, result_shape=...)")
    if callback_flavor is CallbackFlavor.DEBUG and result_shape is not None:
        raise NotImplementedError(
            "you can use the `DEBUG` flavor of callback only when the `result_shape` is None, got "
            f"{result_shape!r}: leave callback_flavor out"
        )
    shapes = jax.tree.map(_shape_of, result_shape)
    return host_call(
        functools.partial(call_and_log, callback_func, call_with_device),
        arg,
        result_shape=shapes,
        vmap_method="sequential" if callback_flavor is CallbackFlavor.PURE else None,
        name=callable_name(callback_func),
    )


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(dtype))
    except TypeError as error:
        raise ValueError(
            "result_shape should be a pytree of values with structure matching the expected result of the callback "
            "function. The values must be either numeric scalars, or must have 'shape' and 'dtype' attributes. Got "
            f"{leaf!r}"
        ) from error


def _check_callable(func: Any, usage: str) -> None:
    if not callable(func):
        raise TypeError(
            f"Expected a callable value, got {func!r}: the function to call on the host comes first, {usage}"
        )


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits until every callback of every computation started before this call has finished; see `hostcallback`'s.

    Args:
        logging_name: names this wait in the debug log.

    Raises:
        CallbackException: callback functions raised since the last wait.
        ReentrantWaitError: called from a tap function (that module would have waited for ever).
    """
    logger.debug("barrier_wait[%s]: start", logging_name or "")
    try:
        barrier.barrier_wait()
    except errors.TapFunctionException as group:
        last = group.failures[-1].exception if group.failures else group.exceptions[-1]
        text = "".join(traceback.format_exception(last))
        raised = CallbackException(f"There were exceptions during callback processing. Last one was: {text}")
        raised.group = group
        raise raised from last
    finally:
        logger.debug("barrier_wait[%s]: done", logging_name or "")


def stop_outfeed_receiver() -> None:
    """Waits as `barrier_wait` does, but reports nothing: what callbacks raised is left to the next `barrier_wait`.

    There is no more to stop. Idle receiver threads sleep, and `jax.lax.outfeed`, for which that module had to be
    stopped, is not used.
    """
    inflight.wait(None, lambda: None)
    runtime.wait_delivered()


def id_tap_dce_sink(*results: Any) -> None:
    """Takes results of taps that the program does not use otherwise; does nothing.

    Taps are effects here, which neither JAX nor XLA drops.
    """


def install() -> None:
    """Puts this module where JAX had its own, so that packages which import that one run unedited.

    From then on `jax.experimental.host_callback` is this module, however it is imported. Call it before those packages
    are imported; a second call changes nothing. Names of that module's internals that packages use raise an error
    which says what took their place.
    """
    here = sys.modules[__name__]
    if sys.modules.get(_OLD_NAME) is here and getattr(experimental, _OLD_ATTRIBUTE, None) is here:
        return
    _replaced.setdefault("module", sys.modules.get(_OLD_NAME))
    _replaced.setdefault("attribute", getattr(experimental, _OLD_ATTRIBUTE, None))
    sys.modules[_OLD_NAME] = here
    setattr(experimental, _OLD_ATTRIBUTE, here)


def uninstall() -> None:
    """Undoes `install`: the name is JAX's again, and what another package had put there is back.

    Packages that were imported meanwhile keep this module. Without an `install` before it does nothing.
    """
    here = sys.modules[__name__]
    module, attribute = _replaced.pop("module", None), _replaced.pop("attribute", None)
    if sys.modules.get(_OLD_NAME) is here:
        del sys.modules[_OLD_NAME]
        if module is not None:
            sys.modules[_OLD_NAME] = module
    if getattr(experimental, _OLD_ATTRIBUTE, None) is here:
        delattr(experimental, _OLD_ATTRIBUTE)
        if attribute is not None:
            setattr(experimental, _OLD_ATTRIBUTE, attribute)


_OLD_ATTRIBUTE = "host_callback"
_OLD_NAME = f"{experimental.__name__}.{_OLD_ATTRIBUTE}"
_replaced: dict[str, ModuleType | None] = {}  # what another package had put there before `install`


def __getattr__(name: str) -> Any:
    raise missing_name_error(__name__, name, sys._getframe(1))


def _options(name: str, device_index: int, **more: Any) -> TapOptions:
    if not isinstance(device_index, int) or device_index < 0:
        raise ValueError(f"device_index is {device_index!r}, expected the number of a device, 0 or more")
    # Primals only; but where a tap itself is in linear code, the transposed code taps the cotangents.
    return TapOptions(name, tap_tangents=False, tap_transposed=True, device_index=device_index, **more)


def _tap(
    arg: Any,
    result: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    if legacy_flags.INLINE.value and compat.trace_context.trace is compat.eval_trace:
        return _tap_inline(arg, result, kwargs, binding, options)
    binding = replace(binding, around=logging_failures)
    return bind_tap(arg, result, kwargs, binding, identity=identity, options=options)


def _tap_inline(arg: Any, result: Any, kwargs: dict[str, Any], binding: Binding, options: TapOptions) -> Any:
    # On the calling thread, with the user's code on the stack: what it raises goes straight to the caller.
    line = str(user_source_line())
    arrays, structure = leaves.split_leaves(arg, "arg", f"{options.name} at {line}")
    parts = TapParts(line, options.params, kwargs, (), structure.unflatten_with(()))
    sink = make_sink(options.kind, parts, binding)
    assert sink is not None  # it prints, or calls the function
    sink(
        Message(
            consumer=Consumer(1, options.name, line, sink),
            arrays=[np.array(array) for array in arrays],
            seq=0,
            time_ns=time.time_ns(),
            run_id=0,
            device=jax.devices()[options.device_index],
            shard_index=None,
        )
    )
    return structure.restore(arg, arrays) if result is None else result
