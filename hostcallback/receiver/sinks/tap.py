"""The sinks that call a user's function with the tapped pytree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from hostcallback.receiver.failures.failure_report import note_logged
from hostcallback.receiver.log import logger, traceback_text
from hostcallback.receiver.messages import ArraysSink, Message, Sink
from hostcallback.receiver.sinks import batches
from hostcallback.receiver.wire.truncation import stack_of_one

Unflatten = Callable[[Sequence[Any]], Any]


CONTEXT = ("transforms", "device", "index")
"""What a tap function gets besides the value, if its signature names it without a default."""


def accepted_keywords(func: Callable[..., Any], names: Sequence[str]) -> frozenset[str]:
    """Returns the names of parameters without a default that can be passed to `func` by keyword.

    A parameter with a default is the user's own (`lambda value, index=i: ...`). None if the signature cannot be read.
    """
    code = getattr(func, "__code__", None)
    if type(func) is FunctionType and code is not None and not func.__dict__:
        # Most functions, in a fraction of the time of a signature.
        names = [name for name in names if name in code.co_varnames]
        if not names:
            return frozenset()
        positional = code.co_varnames[code.co_posonlyargcount : code.co_argcount]
        with_default = code.co_varnames[: code.co_argcount][code.co_argcount - len(func.__defaults__ or ()) :]
        keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        own = {*with_default, *(func.__kwdefaults__ or ())}
        return frozenset(n for n in names if n in (*positional, *keyword_only) and n not in own)
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):
        return frozenset()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(
        name
        for name in names
        if name in parameters
        and parameters[name].kind in by_keyword
        and parameters[name].default is inspect.Parameter.empty
    )


def takes_keyword(func: Callable[..., Any], name: str) -> bool:
    """Whether `func` may be called with a keyword argument of that name; False if its signature cannot be read."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        or (parameter.name == name and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for parameter in parameters
    )


def with_python_scalars(unflatten: Unflatten) -> Unflatten:
    """Returns an `unflatten` that makes Python numbers of arrays without dimensions."""
    return lambda arrays: unflatten([array if array.ndim else array.item() for array in arrays])


def tap_sink(
    func: Callable[..., Any], kwargs: Mapping[str, Any], unflatten: Unflatten, *, batched: bool = False
) -> Sink:
    """Returns the sink that calls `func(arg, **kwargs)` and returns its result.

    It also passes `transforms`, `device` and `index` if the signature of `func` names them without a
    default.

    Args:
        func: the user's tap function.
        kwargs: passed on unchanged; they override `transforms`, `device` and `index`.
        unflatten: makes the pytree `arg` from the message's arrays.
        batched: whether `func` takes stacks of messages; a single message becomes a stack of one.
    """
    sink = _tap_sink(func, dict(kwargs), unflatten)
    return (lambda message: sink(_as_stack(message))) if batched else sink


def _tap_sink(func: Callable[..., Any], kwargs: Mapping[str, Any], unflatten: Unflatten) -> Sink:
    accepted = accepted_keywords(func, CONTEXT) - set(kwargs)
    if not kwargs and not accepted:
        return ArraysSink(lambda arrays: func(unflatten(arrays)))
    if not accepted:
        return ArraysSink(lambda arrays: func(unflatten(arrays), **kwargs))

    def call_with_context(message: Message) -> Any:
        context = {
            "transforms": batches.shown_transforms(message),
            "device": message.device,
            "index": message.shard_index,
        }
        return func(unflatten(message.arrays), **kwargs, **{name: context[name] for name in accepted})

    return call_with_context


def _as_stack(message: Message) -> Message:
    if message.stacked:
        return message
    return message._replace(arrays=[*map(stack_of_one, message.arrays)], stacked=1)


def callback_sink(
    func: Callable[..., Any], unflatten: Unflatten, batchings: batches.Batchings, *, most: int | None = None
) -> Sink:
    """Returns the sink that calls `func(*args, **kwargs)`.

    Args:
        func: the user's function.
        unflatten: makes `(args, kwargs)` from the arrays of one element.
        batchings: the vmaps around the tap, see `batches.Batchings`.
        most: largest number of elements of a batch; None for any number.
    """

    def call(arrays: Sequence[Any]) -> None:
        args, kwargs = unflatten(arrays)
        func(*args, **kwargs)

    if not batchings:
        return ArraysSink(call)
    return lambda message: batches.for_each_element(message, batchings, call, most=most)


def positional_tap_sink(
    func: Callable[..., Any],
    kwargs: Mapping[str, Any],
    unflatten: Unflatten,
    *,
    with_device: bool,
    batched: bool = False,
) -> Sink:
    """Returns the sink that calls `func(arg, transforms)`, with `device=` if `with_device` is true. See `tap_sink`.

    Args:
        func: the user's tap function. Each call gets a new list `transforms`: `[("batch", {"batch_dims": (0,)})]`.
        kwargs: none, since that module's taps have none.
        unflatten: makes the pytree `arg` from the message's arrays.
        batched: False, as above.
        with_device: whether `func` gets the message's device.
    """

    def call(message: Message) -> None:
        transforms = [(name, dict(params)) for name, params in batches.shown_transforms(message)]
        if with_device:
            func(unflatten(message.arrays), transforms, device=message.device)
        else:
            func(unflatten(message.arrays), transforms)

    return call


def logging_failures(sink: Sink) -> Sink:
    """Returns a sink that calls `sink` and logs its errors with their tracebacks before they are deferred."""

    def call(message: Message) -> None:
        try:
            sink(message)
        except Exception as error:
            logger.error("Postponing exception raised in callback function: %s", traceback_text(error))
            note_logged(error)
            raise

    return call


def call_and_log(func: Callable[..., Any], with_device: bool, arg: Any, *, device: Any) -> Any:
    """Returns `func(arg)`, with `device=` if `with_device` is true. Logs errors with their tracebacks."""
    try:
        return func(arg, device=device) if with_device else func(arg)
    except Exception as error:
        logger.error("Postponing exception raised in callback function: %s", traceback_text(error))
        raise
