"""The sinks that call a user's function with the tapped pytree; messages of vmap are split into their elements."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

from hostcallback.receiver.failures.deferred_errors import MultipleFailures
from hostcallback.receiver.failures.failure_report import note_logged
from hostcallback.receiver.log import logger, traceback_text
from hostcallback.receiver.messages import Index, Message, Sink
from hostcallback.receiver.sinks.lane_mask import LaneMask, batch_axes as batch_axes, shown_transforms
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.truncation import is_truncated, stack_of_one

Batchings = Sequence[Sequence[int | None]]
"""For each vmap, innermost first, the axis that it added to each array; None for an array that it did not batch. The
axis number refers to the array without the axes of the vmaps further out."""


def batchings_of(transforms: Sequence[tuple[str, Mapping[str, Any]]]) -> Batchings:
    """Returns the vmaps among the transformations of a tap, which have the format that tap functions get."""
    return [params["batch_dims"] for name, params in transforms if name == "batch"]


def elements(
    arrays: Sequence[Array], batchings: Batchings, places: Index | None = None, most: int | None = None
) -> Iterator[tuple[tuple[int, ...], Sequence[Array]]]:
    """Yields the index of each element of a batch, the outermost vmap's first, and its arrays.

    The innermost vmap's index moves slowest, because JAX unrolls that vmap first, and then each of its elements under
    the next one. An array that is not batched is repeated. All arrays are copies, so that elements share no memory.
    For shards, whose `places` in the whole arrays are given, it yields the elements that all shards have.

    Raises:
        ValueError: whole arrays disagree on the size of a batch, or it has more than `most` elements.
    """
    batched = [
        _batch_first(arrays, batchings, i, None if places is None else places[i]) for i in range(len(arrays))
    ]
    spans = [
        [axis.span(view.shape) for view, axes in batched if (axis := axes.get(level)) is not None]
        for level in range(len(batchings))
    ]
    if places is None and any(len(set(found)) > 1 for found in spans):
        raise ValueError(
            f"arrays of shapes {[array.shape for array in arrays]}, batched along {[*map(tuple, batchings)]}, are not "
            "one batch: the message was damaged or made by another version"
        )
    # A vmap may have batched no array at all, but the mask of the message: its arrays are of all of its elements.
    ranges = [
        range(max(start for start, _ in found), min(stop for _, stop in found)) if found else range(1)
        for found in spans
    ]
    count = math.prod(max(each.stop - each.start, 0) for each in ranges)
    if most is not None and count > most:
        raise ValueError(
            f"a batch of {count:,} elements came from outside this process, at most {most:,} are taken"
        )
    for index in itertools.product(*ranges):
        taken = []
        for view, axes in batched:
            where: tuple[Any, ...] = (*(index[level] - axis.start for level, axis in axes.items()), ...)
            taken.append(view[where].copy())
        yield index[::-1], taken


def elements_of(
    message: Message, batchings: Batchings, most: int | None = None
) -> Iterator[tuple[tuple[int, ...], Sequence[Array]]]:
    """Yields what `elements` does for a message; the indices are those in the whole batch, if it has only a part."""
    whole = message.elements
    mask = None if whole is None else LaneMask.of(message.consumer.transforms)
    for index, arrays in elements(message.arrays, batchings, message.shard_index, most):
        if whole is not None and mask is not None:
            place = len(index) - 1 - mask.place
            index = (*index[:place], *(int(axis[index[place]]) for axis in whole), *index[place + 1 :])
        yield index, arrays


class _BatchAxis(NamedTuple):
    position: int  # among the batch axes of its array
    start: int  # of the array's shard in the whole

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        return self.start, self.start + shape[self.position]


def _batch_first(
    arrays: Sequence[Array], batchings: Batchings, which: int, place: Sequence[slice] | None
) -> tuple[Array, dict[int, _BatchAxis]]:
    # Returns one array with its batch axes first, innermost vmap first, and by vmap the position of its axis.
    array = arrays[which]
    taken = batch_axes(array.ndim, [dims[which] for dims in batchings])
    axes = [axis for axis in range(array.ndim) if axis not in taken.values()]
    levels = sorted(taken)
    starts = [0 if place is None else place[taken[level]].start for level in levels]
    return array.transpose([*(taken[level] for level in levels), *axes]), {
        level: _BatchAxis(position, start)
        for position, (level, start) in enumerate(zip(levels, starts, strict=True))
    }


class _Delivered:
    elements = 0  # threads may lose each other's increments: a change says enough
    last: ClassVar[dict[int, float]] = {}  # by ident of a thread, when its last element began


_delivered = _Delivered()


def elements_delivered() -> int:
    """Returns a number that grows while the elements of a batch are delivered."""
    return _delivered.elements


def last_element(thread: int | None) -> float:
    """Returns the `perf_counter()` value at which a thread's last element began, by its ident; 0.0 if none did."""
    return 0.0 if thread is None else _delivered.last.get(thread, 0.0)


def for_each_element(
    message: Message,
    batchings: Batchings,
    consume: Callable[[Sequence[Array]], None],
    *,
    most: int | None = None,
) -> None:
    """Calls `consume` with the arrays of each element. An error for one element does not affect the others.

    If the arrays of the message were truncated, calls `consume` once, with the heads of the whole batch.

    Raises:
        MultipleFailures: has all errors of `consume`, each with a note that names the element.
        ValueError: the batch has more than `most` elements.
    """
    if not batchings or is_truncated(message.arrays):  # truncated arrays do not show the elements' boundaries
        consume(message.arrays)
        return
    failures: list[BaseException] = []
    here = get_ident()
    for index, element in elements_of(message, batchings, most):
        _delivered.elements += 1
        _delivered.last[here] = perf_counter()
        try:
            consume(element)
        except BaseException as error:  # a failing element must not withhold the others
            error.add_note(f"element {', '.join(map(str, index))} of the batch")
            failures.append(error)
    if failures:
        raise MultipleFailures("calls for elements of one batch failed", failures)


Unflatten = Callable[[Sequence[Any]], Any]


CONTEXT = ("transforms", "device", "index")
"""What a tap function gets besides the value, if its signature names it without a default."""


def accepted_keywords(func: Callable[..., Any], names: Sequence[str]) -> frozenset[str]:
    """Returns the names of parameters without a default that can be passed to `func` by keyword.

    A parameter with a default is the user's own (`lambda value, index=i: ...`). None if the signature cannot be read.
    """
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
        return lambda message: func(unflatten(message.arrays))
    if not accepted:
        return lambda message: func(unflatten(message.arrays), **kwargs)

    def call_with_context(message: Message) -> Any:
        context = {
            "transforms": shown_transforms(message),
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
    func: Callable[..., Any], unflatten: Unflatten, batchings: Batchings, *, most: int | None = None
) -> Sink:
    """Returns the sink that calls `func(*args, **kwargs)`.

    Args:
        func: the user's function.
        unflatten: makes `(args, kwargs)` from the arrays of one element.
        batchings: the vmaps around the tap, in the format of `unbatch`.
        most: largest number of elements of a batch; None for any number.
    """

    def call(arrays: Sequence[Any]) -> None:
        args, kwargs = unflatten(arrays)
        func(*args, **kwargs)

    return lambda message: for_each_element(message, batchings, call, most=most)


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
        transforms = [(name, dict(params)) for name, params in shown_transforms(message)]
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
