"""A drop-in for `jax.experimental.host_callback` as of JAX 0.4.34: `from hostcallback import host_callback as hcb`.

Names, signatures and behaviour equal those of that module's documentation: primal values only under autodiff, one
batched message under vmap, `transforms` as a list that is passed by position, one tap per device under pmap.
`install()` replaces that module by this one, for packages that cannot be edited. The names here are not deprecated and
emit no deprecation warnings. Taps also work where that module's did not (shard_map, custom derivatives of every kind).
`hostcallback.id_tap` documents threads, order and waiting. docs/migrating.md lists every name and the differences.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import opcode
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
from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver import errors
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding, TapParts, make_sink
from hostcallback.receiver.sinks.tap import call_and_log, logging_failures, positional_tap_sink
from hostcallback.receiver.tap_arguments import SupportsWrite
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.sync import inflight
from hostcallback.tracing import leaves
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_spec import TapOptions, callable_name


class CallbackFlavor(enum.Enum):
    """The callback that JAX 0.4.34 used when `JAX_HOST_CALLBACK_LEGACY` was off.

    Here all flavors are equal, except that `call` works under vmap only with `PURE`.
    """

    IO_CALLBACK = 1
    PURE = 2
    DEBUG = 3


class CallbackException(Exception):
    """Callback functions raised. Its `__cause__` is the last exception.

    Attributes:
        group: all exceptions, each with its tap, source line and device.
    """

    group: errors.TapFunctionException


TapFunctionException = CallbackException
"""An older name of that exception in the same module."""


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
    """Sends `arg` to the host, which calls `tap_func(arg, transforms)`. In the program it is an identity.

    Order, threads and blocking are those of `hostcallback.id_tap`. Exceptions of `tap_func` are logged, do not stop the
    program, and are reported by `barrier_wait`.

    Args:
        tap_func: called with the pytree of numpy arrays and the list of transformations applied to the tap, such as
            `[]` or `[("batch", {"batch_dims": (0, None)})]`. Its result is ignored. If vmap batches the predicate of a
            `cond` or `while_loop`, it gets the elements that take part; the last entry is then
            `("mask", {"elements": (indices,)})`.
        arg: a pytree of arrays and numbers.
        result: the value to return; `arg` if None. It is not sent.
        tap_with_device: whether `tap_func` also gets `device=`, the `jax.Device` of the value.
        device_index: if the compiler partitions the program over several devices, the whole value arrives once, and
            `device` is the program's device with this index. It has no effect in other programs.
        callback_flavor: accepted; all flavors of taps are equal.
        **kwargs: none; see Raises.

    Returns:
        `result`, or `arg` if it is None. It need not be used.

    Raises:
        TypeError: `tap_func` is not callable, JAX cannot trace a leaf of `arg`, or keyword arguments are given.

    Example:
        x = hcb.id_tap(lambda arg, transforms: print(arg), x)
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
    """Prints `arg` on the host. In the program it is an identity. See `id_tap`.

    It prints the keyword arguments on one line, sorted by key, including `device` and `transforms` if there are any:
    `device: cpu:0 transforms: [('batch', {'batch_dims': (0,)})] what: x`. Then it prints the value: `( a b )`,
    `[ a b ]`, `{ key=a }`, arrays by `numpy.array2string`, on one line if that fits into 80 columns.

    Args:
        arg: as in `id_tap`.
        result: as in `id_tap`.
        tap_with_device: whether the device is printed.
        device_index: as in `id_tap`.
        output_stream: an object with `write(str)`, called once per message on receiver threads; `sys.stdout` if None.
        threshold: number of elements above which arrays are summarised; None for numpy's setting.
        callback_flavor: as in `id_tap`.
        **kwargs: host values to print.

    Returns:
        `result`, or `arg` if it is None.

    Raises:
        TypeError: JAX cannot trace a leaf of `arg`, or a keyword argument is traced.

    Example:
        x = hcb.id_print(x, what="x")
    """

    identity = ("host_callback.id_print", output_stream, threshold, tap_with_device)
    params = {"threshold": threshold, "with_device": tap_with_device}
    options = _options("id_print", device_index, kind=tap_descriptor.PRINT, params=params)
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

    Order, threads and errors are those of `hostcallback.call`: an exception of `callback_func` ends the program, is
    logged, and is reported by `barrier_wait`.

    Args:
        callback_func: called with the pytree of numpy arrays; returns a pytree of numpy arrays or numbers.
        arg: a pytree of arrays and numbers.
        result_shape: a pytree like the result, of numbers or of objects with `shape` and `dtype`. None or `()` for a
            function that returns that.
        call_with_device: whether `callback_func` also gets `device=`, the `jax.Device` of the call.
        device_index: accepted; each device makes its call, and a call in a program that the compiler partitions over
            several devices is refused.
        callback_flavor: with `PURE` vmap calls once per element; with the others vmap is refused.

    Returns:
        The result of `callback_func`, as arrays.

    Raises:
        TypeError: `callback_func` is not callable, or JAX cannot trace a leaf of `arg`.
        ValueError: a leaf of `result_shape` has no shape or dtype; or, later, the call is differentiated (put
            `jax.custom_vjp` around it, as in the original module).
        NotImplementedError: the flavor is `DEBUG` and there is a result; or, later, the call is under vmap.

    Example:
        y = hcb.call(np.sin, x, result_shape=x)
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
    """Waits until all callbacks of all computations started before this call have ended.

    See `hostcallback.barrier_wait`.

    Args:
        logging_name: names this wait in the debug log.

    Raises:
        CallbackException: callback functions raised since the last wait.
        ReentrantWaitError: called from a tap function (the original module would have waited without end).
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
    """Waits like `barrier_wait`, but leaves the exceptions of callbacks to the next `barrier_wait`.

    It stops no threads, because idle receiver threads sleep and do not use `jax.lax.outfeed`, for which the original
    module had to be stopped.
    """
    inflight.wait(None, lambda: None)
    runtime.wait_delivered()


def id_tap_dce_sink(*results: Any) -> None:
    """Does nothing: JAX and XLA do not drop taps whose results are unused, because taps are effects here."""


def install() -> None:
    """Makes this module `jax.experimental.host_callback`, so that packages that import the latter run unedited.

    All ways to import that name then give this module. Call it before those packages are imported; a second call has no
    effect. Looking up a name of that module's internals raises an error with the replacement.

    Example:
        hostcallback.host_callback.install()
        import old_package
    """
    here = sys.modules[__name__]
    if sys.modules.get(_OLD_NAME) is here and getattr(experimental, _OLD_ATTRIBUTE, None) is here:
        return
    _replaced.setdefault("module", sys.modules.get(_OLD_NAME))
    _replaced.setdefault("attribute", getattr(experimental, _OLD_ATTRIBUTE, None))
    sys.modules[_OLD_NAME] = here
    setattr(experimental, _OLD_ATTRIBUTE, here)


def uninstall() -> None:
    """Undoes `install`, and restores the module that another package had put there.

    Packages that were imported meanwhile keep this module. Without an earlier `install` it does nothing.
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
_replaced: dict[str, ModuleType | None] = {}  # the objects that were there before `install`


# ---- The flags of that module, and errors for the names of its internals --------------------------------------------

_INLINE = compat.define_flag(
    "jax_host_callback_inline",
    False,
    "Taps of the drop-in module that are outside of jit and of every transformation run on the calling thread.",
    lambda value: None,
)


def _accept_flag(name: str, default: bool | int, why: str) -> None:
    def say(value: Any) -> None:
        if value != default:
            logger.info("%s=%s has no effect: %s", name, value, why)

    compat.define_flag(name, default, f"Has no effect: {why}.", say)


_accept_flag(
    "jax_host_callback_max_queue_byte_size",
    256_000_000,
    "HOSTCALLBACK_RING_BYTES and HOSTCALLBACK_BLOCK_BUDGET_BYTES bound what a device may have queued",
)
_accept_flag("jax_host_callback_outfeed", False, "no transport uses XLA's outfeed")
_accept_flag("jax_host_callback_legacy", False, "taps always do what that module's documentation says")


_TAP_PRIMITIVE = (
    "in a jaxpr a tap is an equation whose primitive is called 'tap', a call one of 'host_call'; their rules for "
    "transformations are registered already"
)
_NO_DEPENDENCE = (
    "taps are effects, which neither JAX nor XLA drops: use the result of id_tap, or nothing at all"
)
_RECEIVERS = (
    "receivers start by themselves; hostcallback.outfeed_receiver() scopes them, and barrier_wait() waits and reports "
    "what callbacks raised"
)
_XLA = (
    "taps are not operations of XLA's client library: annotate values with jax.Array, devices with jax.Device"
)

# The names of JAX 0.4.34 and of earlier versions that packages were written for. The first matching pattern applies.
_REPLACEMENTS = {
    "id_tap_dep_p": _NO_DEPENDENCE,
    "id_tap_dce_p": _NO_DEPENDENCE,
    "id_p": _NO_DEPENDENCE,
    "id_tap_p": _TAP_PRIMITIVE,
    "outside_call_p": _TAP_PRIMITIVE,
    "outfeed_receiver": _RECEIVERS,
    "_callback_handler_data": _RECEIVERS,
    "_CallbackHandlerData": _RECEIVERS,
    "_callback_input_received": _RECEIVERS,
    "_initialize_outfeed_receiver": _RECEIVERS,
    "_outfeed_receiver": _RECEIVERS,
    "_register_callback": "hand the function to id_tap or call, which register it where it is lowered",
    "_CallbackWrapper": "hand the function to id_tap or call, equal ones share a consumer",
    "_print_tap_*": "id_print(x, output_stream=...) prints, in one write per message",
    "_print_consumer": "id_print(x, output_stream=...) prints, in one write per message",
    "_deprecated_*": "the name without '_deprecated_' is not deprecated here",
    "_call": "call(callback_func, arg, result_shape=...)",
    "_inline_host_callback": "jax.config.update('jax_host_callback_inline', True)",
    "_use_outfeed": "no transport uses XLA's outfeed, on any platform",
    "_raise_if_using_outfeed_*": "no transport uses XLA's outfeed, on any platform",
    "_HOST_CALLBACK_*": "the flags are jax.config's: jax.config.update('jax_host_callback_inline', True)",
    "_outside_call_*": _TAP_PRIMITIVE,
    "_rewrite_*": "no program is rewritten, and JAX threads the token of ordered taps",
    "_with_sharding_proto": "where the compiler partitions a program a tap follows the sharding of its operands",
    "_add_transform": "a tap function gets its transformations as its second argument",
    "_aval_is_empty": "arrays without elements are sent like others: ask array.size == 0",
    "_instantiate_zeros": "jax.interpreters.ad.instantiate_zeros",
    "_values_to_avals": "jax.tree.map(jax.typeof, values)",
    "_deprecation_msg": "nothing here is deprecated",
    "_deprecations": "nothing here is deprecated",
    "xops": _XLA,
    "Xla*": _XLA,
    "DType": _XLA,
}


def __getattr__(name: str) -> Any:
    text = f"module {__name__!r} has no attribute {name!r}"
    found = (cure for pattern, cure in _REPLACEMENTS.items() if fnmatch.fnmatchcase(name, pattern))
    replacement = next(found, None)
    if replacement is None:
        raise AttributeError(text, name=name)
    text += f", an internal of the outfeed of jax.experimental.host_callback. In its place: {replacement}"
    asker = sys._getframe(1)
    # For `from module import name`, Python would replace an AttributeError by an ImportError without its text.
    if asker.f_code.co_code[asker.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        raise ImportError(text, name=__name__)
    raise AttributeError(text, name=name)


# ---- Taps ------------------------------------------------------------------------------------------------------------


def _options(name: str, device_index: int, **more: Any) -> TapOptions:
    if not isinstance(device_index, int) or device_index < 0:
        raise ValueError(f"device_index is {device_index!r}, expected the number of a device, 0 or more")
    # Taps primals only; but if the tap is in linear code, the transposed code taps the cotangents.
    return TapOptions(name, tap_tangents=False, tap_transposed=True, device_index=device_index, **more)


def _tap(
    arg: Any,
    result: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    if _INLINE.value and compat.trace_context.trace is compat.eval_trace:
        return _tap_inline(arg, result, kwargs, binding, options)
    binding = replace(binding, around=logging_failures)
    return bind_tap(arg, result, kwargs, binding, identity=identity, options=options)


def _tap_inline(arg: Any, result: Any, kwargs: dict[str, Any], binding: Binding, options: TapOptions) -> Any:
    # Runs on the calling thread with the user's code on the stack, so its exceptions go to the caller.
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
