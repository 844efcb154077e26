"""The sink of `print` and `log`: formats the tapped arguments once per element of a batch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks import described_template
from hostcallback.receiver.sinks.print import SupportsWrite, write_at_once
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.sinks.unbatch import Batchings, for_each_element
from hostcallback.receiver.terminal import printable_lines
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.receiver.wire.pytree import is_plain

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
    present: Callable[[Array], Any] | None = None
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
        printoptions = {key: value for key, value in self.printoptions.items() if is_plain(value)}
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
        """Largest number of elements of a batch; None for any number."""
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
            batchings: the vmaps around the tap, in the format of `unbatch`.
            deliver: gets the texts of each message, one per element, in order.
        """
        self._template = template
        self._unflatten = unflatten
        self._batchings = batchings
        self._deliver = deliver

    @property
    def is_portable(self) -> bool:
        """Whether the reader process, which has the same standard output, can run this sink."""
        return isinstance(self._deliver, PrintLines) and self._deliver.stream is None

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
