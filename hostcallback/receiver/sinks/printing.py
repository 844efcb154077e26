"""The sinks of prints: `print` and `log` by a format string, `id_print` in host_callback's format."""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message, device_text
from hostcallback.receiver.sinks import described_template
from hostcallback.receiver.sinks.batches import Batchings, for_each_element, shown_transforms
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.tap_arguments import SupportsWrite
from hostcallback.receiver.text import printable_lines
from hostcallback.receiver.wire import array_types, pytree, truncation

WIDTH = 80
"""Number of columns within which a container is printed on one line."""


_print_lock = threading.Lock()  # keeps the lines of one message together across devices


class EscapedOutput:
    """The current `sys.stdout`, for text from outside this process."""

    def write(self, text: str, /) -> None:
        """Writes the text with control characters escaped."""
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

above_bars: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
"""Makes room for text above the progress bars of a terminal; set while there are bars."""


def _discard_buffer() -> None:
    # Python flushes what is left in the buffer at its end, and would print another BrokenPipeError.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        label = value.label if isinstance(value, truncation.TruncatedArray) else ""
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


Deliver = Callable[[list[str]], None]
"""Function that takes the texts of one message, such as `PrintLines`."""

_options_lock = threading.Lock()  # protects numpy's print options, which all threads share before numpy 2.1


@dataclass(frozen=True, slots=True)
class Template:
    """A format string with the options under which it is filled.

    Attributes:
        fmt: the format string.
        has_placeholders: whether it has placeholders; if not, the arguments follow it, separated by spaces.
        printoptions: numpy's print options in effect during formatting.
        present: converts each array before formatting; None to format numpy arrays.
        is_foreign: whether another process wrote it; see `hostcallback.receiver.sinks.described_template`.
    """

    fmt: str
    has_placeholders: bool
    printoptions: Mapping[str, Any]
    present: Callable[[array_types.Array], Any] | None = None
    is_foreign: bool = False

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Template:
        """The template that another process described in the `params` of a tap.

        Raises:
            KeyError: they hold none.
            ValueError: they hold something else.
        """
        fmt = params["fmt"]
        if type(fmt) is not str:
            raise ValueError(f"the format string is a {type(fmt).__name__}")
        printoptions = described_template.print_options(params["printoptions"])
        return cls(fmt, bool(params["has_placeholders"]), printoptions, is_foreign=True)

    def params(self) -> dict[str, Any]:
        """The same as plain data, for processes that did not trace the tap; without `present`."""
        printoptions = {key: value for key, value in self.printoptions.items() if pytree.is_plain(value)}
        return {
            "fmt": self.fmt, "has_placeholders": self.has_placeholders, "printoptions": printoptions
        }  # fmt: skip

    def fill(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Returns the text without a line end."""
        if self.is_foreign:
            if self.has_placeholders:
                return described_template.fill(self.fmt, args, kwargs)
            return described_template.join(self.fmt, args)
        if self.has_placeholders:
            return self.fmt.format(*args, **kwargs)
        return " ".join((self.fmt, *map(str, args)))

    @property
    def most_elements(self) -> int | None:
        """Maximum number of elements of a batch; None for no limit."""
        return limits.BATCH_ELEMENTS if self.is_foreign else None

    @contextlib.contextmanager
    def options(self) -> Iterator[None]:
        """Sets numpy's print options to the template's within the block."""
        if np.get_printoptions() == self.printoptions:
            yield
            return
        with _options_lock, np.printoptions(**self.printoptions):
            yield


class FormatSink:
    """Formats messages and hands on the texts of each in one call."""

    __slots__ = ("_batchings", "_deliver", "_template", "_unflatten")

    def __init__(
        self, template: Template, unflatten: Unflatten, batchings: Batchings, deliver: Deliver
    ) -> None:
        """Makes the sink of one tap.

        Args:
            template: formats the text.
            unflatten: makes `(args, kwargs)` from the arrays of one element.
            batchings: the vmaps around the tap, see `batches.Batchings`.
            deliver: gets the texts of each message, one per element, in order.
        """
        self._template = template
        self._unflatten = unflatten
        self._batchings = batchings
        self._deliver = deliver

    def escaped(self) -> FormatSink:
        """The same sink, whose output is escaped."""
        deliver = self._deliver

        def deliver_escaped(texts: list[str]) -> None:
            deliver([printable_lines(text, "    ") for text in texts])

        return FormatSink(self._template, self._unflatten, self._batchings, deliver_escaped)

    def texts(self, message: Message) -> list[str]:
        """Returns the texts of a message, one per element."""
        texts: list[str] = []
        FormatSink(self._template, self._unflatten, self._batchings, texts.extend)(message)
        return texts

    def __call__(self, message: Message) -> None:
        """Formats one message. An element that cannot be formatted does not affect the others."""
        texts: list[str] = []
        template, present = self._template, self._template.present
        left, skipped = limits.MESSAGE_CHARS if template.is_foreign else -1, 0

        def format_one(arrays: Sequence[Any]) -> None:
            nonlocal left, skipped
            if not left:
                skipped += 1
                return
            args, kwargs = self._unflatten(arrays if present is None else [*map(present, arrays)])
            texts.append(template.fill(args, kwargs))
            if left > 0:
                left = max(left - len(texts[-1]) - 1, 0)

        try:
            with template.options():
                for_each_element(message, self._batchings, format_one, most=template.most_elements)
        finally:
            if skipped:
                texts.append(f"(the texts of {skipped} more elements of the batch are left out)")
            if texts:
                self._deliver(texts)


class PrintLines:
    """Writes the texts of a message as lines, all in one write.

    Attributes:
        stream: the stream; None for the value of `sys.stdout` at the time of the write.
    """

    __slots__ = ("stream",)

    def __init__(self, stream: SupportsWrite | None) -> None:
        """Writes to `stream`."""
        self.stream = stream

    def __call__(self, texts: list[str]) -> None:
        """Writes the texts of one message."""
        write_at_once(self.stream, "".join(text + "\n" for text in texts))


def log_records(logger: logging.Logger, level: int, file: str, line: int, function: str) -> Deliver:
    """Returns a function that logs each text as a record with the given place in the user's code."""

    def deliver(texts: list[str]) -> None:
        if logger.isEnabledFor(level):
            for text in texts:
                logger.handle(logger.makeRecord(logger.name, level, file, line, text, (), None, function))

    return deliver
