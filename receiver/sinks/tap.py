"""The sink that calls a user's tap function with the tapped pytree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from receiver.message import Message

Unflatten = Callable[[Sequence[Any]], Any]


def accepted_keywords(func: Callable[..., Any], names: Sequence[str]) -> frozenset[str]:
    """Which of `names` can be passed to `func` by keyword; none if its signature cannot be read."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):
        return frozenset()
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name in names if name in parameters and parameters[name].kind in by_keyword)


class TapSink:
    """Calls `func(arg, **kwargs)`, with `transforms` and `device` when the signature names them."""

    __slots__ = ("_device", "_func", "_kwargs", "_transforms", "_unflatten")

    def __init__(self, func: Callable[..., Any], kwargs: Mapping[str, Any], unflatten: Unflatten) -> None:
        """`unflatten` makes the pytree that `func` receives from its array leaves."""
        self._func = func
        self._kwargs = dict(kwargs)
        self._unflatten = unflatten
        accepted = accepted_keywords(func, ("transforms", "device")) - set(kwargs)
        self._transforms = "transforms" in accepted
        self._device = "device" in accepted

    def __call__(self, message: Message) -> None:
        """Delivers one message to the tap function."""
        kwargs = self._kwargs
        if self._transforms or self._device:
            kwargs = dict(kwargs)
            if self._transforms:
                kwargs["transforms"] = message.consumer.transforms
            if self._device:
                kwargs["device"] = message.device
        self._func(self._unflatten(message.arrays), **kwargs)
