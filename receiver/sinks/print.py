"""The sink of id_print: prints keyword arguments, then the value, in host_callback's format."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.lane_mask import shown_transforms
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.terminal import printable_lines
from hostcallback.receiver.wire.truncation import TruncatedArray

WIDTH = 80
"""Number of columns within which a container is printed on one line."""


_print_lock = threading.Lock()  # keeps the lines of one message together across devices


class SupportsWrite(Protocol):
    """Protocol of `output_stream` of id_print."""

    def write(self, text: str, /) -> Any:
        """Writes the text."""


class EscapedOutput:
    """The standard output as it is then, for text from outside this process."""

    def write(self, text: str, /) -> None:
        """Writes the text without what a terminal would obey."""
        sys.stdout.write(printable_lines(text))


def write_at_once(stream: SupportsWrite | None, text: str) -> None:
    """Writes the text of one message in one piece, which no other message can split.

    None stands for `sys.stdout`. After the reader of a pipe has ended, as `| head -1` does, the text is dropped.
    """
    global _is_unread
    above = above_bars if stream is None else None
    with contextlib.nullcontext() if above is None else above(), _print_lock:
        if stream is not None:
            stream.write(text)
        elif not _is_unread:
            try:
                sys.stdout.write(text)
            except BrokenPipeError:
                _is_unread = True
                atexit.register(_discard_buffer)
                logger.warning(
                    "the reader of the standard output has ended: what taps print is dropped from here on"
                )


_is_unread = False

above_bars: Callable[[], AbstractContextManager[Any]] | None = None
"""Makes room for text above the progress bars of a terminal; set while there are bars."""


def _discard_buffer() -> None:
    # Python flushes what is left in the buffer at its end, and would print another BrokenPipeError.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def device_text(device: Any) -> str:
    """Returns the name of a device in reports, such as `cpu:0`."""
    return f"{device.platform}:{device.id}" if hasattr(device, "platform") else str(device)


def place_text(place: tuple[slice, ...]) -> str:
    """Returns the place of a shard as the index of that part of the whole array: `[0:2, 2:4]`."""
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in place) + "]"


class PrintSink:
    """Prints `key: value` pairs sorted by key on one line, then the value."""

    __slots__ = ("_kwargs", "_stream", "_threshold", "_unflatten", "_with_device")

    def __init__(
        self,
        kwargs: Mapping[str, Any],
        unflatten: Unflatten,
        output_stream: SupportsWrite | None,
        threshold: int | None,
        *,
        with_device: bool = False,
    ) -> None:
        """Makes the sink of one print.

        Args:
            kwargs: the key-value pairs.
            unflatten: makes the value from the message's arrays.
            output_stream: the stream; None for the value of `sys.stdout` when a message is printed.
            threshold: see `format_value`.
            with_device: whether to print `device` with the pairs.
        """
        self._kwargs = dict(kwargs)
        self._unflatten = unflatten
        self._stream = output_stream
        self._threshold = threshold
        self._with_device = with_device

    @property
    def is_portable(self) -> bool:
        """Whether the reader process, which has the same standard output, can run this sink."""
        return self._stream is None

    def escaped(self) -> PrintSink:
        """The same sink, whose output is escaped."""
        output = EscapedOutput()
        return PrintSink(
            self._kwargs, self._unflatten, output, self._threshold, with_device=self._with_device
        )

    def texts(self, message: Message) -> list[str]:
        """Returns the printed text of a message, without the device and the line end."""
        stream = io.StringIO()
        PrintSink(self._kwargs, self._unflatten, stream, self._threshold)(message)
        return [stream.getvalue().rstrip("\n")]

    def __call__(self, message: Message) -> None:
        """Prints one message."""
        pairs: dict[str, Any] = dict(self._kwargs)
        if message.consumer.transforms:
            pairs["transforms"] = [
                (name, params) if params else name for name, params in shown_transforms(message)
            ]
        if self._with_device:
            pairs["device"] = message.device
        if message.shard_index is not None:
            pairs["device"] = device_text(message.device)
            pairs["index"] = " ".join(map(place_text, message.shard_index))
        lines = [format_value(self._unflatten(message.arrays), self._threshold)]
        if pairs:
            lines.insert(0, " ".join(f"{key}: {value}" for key, value in sorted(pairs.items())))
        write_at_once(self._stream, "\n".join(lines) + "\n")


class _Container(NamedTuple):
    # A tuple, list or dict: its brackets, its items with a label each, and its text on one line.
    opening: str
    parts: list[tuple[str, _Container | str]]
    closing: str
    flat: str


def format_value(value: Any, threshold: int | None) -> str:
    """Formats a pytree in host_callback's format: `( a b )`, `[ a b ]`, `{ k=v }`, arrays by `array2string`.

    A container is on one line if it fits into 80 columns; otherwise each element has a line, indented by two. This
    follows the layout of JAX's pretty printer (Lindig, Strictly Pretty, 2000) exactly, so the lines of an array are not
    indented, and its line breaks count as columns.

    Args:
        value: the pytree.
        threshold: number of elements above which arrays are summarised; None for numpy's setting.
    """
    return _lay_out(_describe(value, threshold), 0, 0)


def _describe(value: Any, threshold: int | None) -> _Container | str:
    if isinstance(value, tuple):
        return _contain("( ", [("", _describe(item, threshold)) for item in value], " )")
    if isinstance(value, list):
        return _contain("[ ", [("", _describe(item, threshold)) for item in value], " ]")
    if isinstance(value, dict):
        return _contain("{ ", [(f"{key}=", _describe(value[key], threshold)) for key in _sorted(value)], " }")
    if isinstance(value, np.ndarray):
        label = value.label if isinstance(value, TruncatedArray) else ""
        return label + np.array2string(np.asarray(value), threshold=threshold)
    return str(value)


def _sorted(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # keys of several types
        return sorted(keys, key=str)


def _contain(opening: str, parts: list[tuple[str, _Container | str]], closing: str) -> _Container:
    flat = " ".join(label + (part if isinstance(part, str) else part.flat) for label, part in parts)
    return _Container(opening, parts, closing, opening + flat + closing)


def _lay_out(part: _Container | str, indent: int, column: int) -> str:
    if isinstance(part, str):
        return part
    if column + len(part.flat) <= WIDTH:
        return part.flat
    indent += 2
    column += len(part.opening)
    texts = []
    for label, item in part.parts:
        texts.append(label + _lay_out(item, indent, column + len(label)))
        column = indent  # the items after the first start at the indentation
    return part.opening + ("\n" + " " * indent).join(texts) + part.closing
