"""The sink of `callback`: calls a function with the tapped arguments, once for each element of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from receiver.messages.consumer import Sink
from receiver.sinks.tap import Unflatten
from receiver.sinks.unbatch import Batchings, for_each_element


def callback_sink(func: Callable[..., Any], unflatten: Unflatten, batchings: Batchings) -> Sink:
    """The sink that calls `func(*args, **kwargs)`.

    Args:
        func: the user's function.
        unflatten: makes `(args, kwargs)` from the arrays of one element.
        batchings: the vmaps around the tap, as `unbatch` takes them.
    """

    def call(arrays: Sequence[Any]) -> None:
        args, kwargs = unflatten(arrays)
        func(*args, **kwargs)

    return lambda message: for_each_element(message, batchings, call)
