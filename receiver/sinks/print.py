"""The sink of id_print: keyword arguments, then the value, as host_callback printed them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from receiver.message import Message
from receiver.sinks.tap import Unflatten

_print_lock = threading.Lock()  # keeps the lines of one message together across devices


class SupportsWrite(Protocol):
    """What id_print needs of `output_stream`."""

    def write(self, text: str, /) -> Any:
        """Writes the text."""


def format_value(value: Any, threshold: int) -> str:
    """Formats a pytree as host_callback did: `( a b )`, `[ a b ]`, `{ k=v }`, arrays by `array2string`."""
    if isinstance(value, tuple):
        return "( " + _join(value, threshold) + " )"
    if isinstance(value, list):
        return "[ " + _join(value, threshold) + " ]"
    if isinstance(value, dict):
        pairs = [f"{key}={format_value(value[key], threshold)}" for key in sorted(value, key=str)]
        return "{ " + _separate(pairs) + " }"
    if isinstance(value, np.ndarray):
        return np.array2string(value, threshold=threshold)
    return str(value)


def _join(values: Any, threshold: int) -> str:
    return _separate([format_value(value, threshold) for value in values])


def _separate(parts: list[str]) -> str:
    # One line while it is short; otherwise one element a line, indented by two, as JAX's printer breaks.
    if sum(map(len, parts)) + len(parts) <= 76 and not any("\n" in part for part in parts):
        return " ".join(parts)
    return "\n  ".join(part.replace("\n", "\n  ") for part in parts)


class PrintSink:
    """Prints `key: value` pairs sorted by key on one line, then the value."""

    __slots__ = ("_kwargs", "_stream", "_threshold", "_unflatten")

    def __init__(
        self,
        kwargs: Mapping[str, Any],
        unflatten: Unflatten,
        output_stream: SupportsWrite | None,
        threshold: int,
    ) -> None:
        """`output_stream` None means `sys.stdout` as it is when a message is printed."""
        self._kwargs = dict(kwargs)
        self._unflatten = unflatten
        self._stream = output_stream
        self._threshold = threshold

    def __call__(self, message: Message) -> None:
        """Prints one message."""
        pairs: dict[str, Any] = dict(self._kwargs)
        if message.consumer.transforms:
            pairs["transforms"] = [
                (name, params) if params else name for name, params in message.consumer.transforms
            ]
        lines = [format_value(self._unflatten(message.arrays), self._threshold)]
        if pairs:
            lines.insert(0, " ".join(f"{key}: {value}" for key, value in sorted(pairs.items())))
        # One write for the message, so that other threads' output cannot split it.
        text = "\n".join(lines) + "\n"
        with _print_lock:
            (sys.stdout if self._stream is None else self._stream).write(text)
