"""The sink of id_print: keyword arguments, then the value, as host_callback printed them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from receiver.messages.message import Message
from receiver.sinks.layout import format_value
from receiver.sinks.tap import Unflatten

_print_lock = threading.Lock()  # keeps the lines of one message together across devices


class SupportsWrite(Protocol):
    """What id_print needs of `output_stream`."""

    def write(self, text: str, /) -> Any:
        """Writes the text."""


def write_at_once(stream: SupportsWrite | None, text: str) -> None:
    """Writes the text of one message, so that other messages cannot split it; to `sys.stdout` if `stream` is None."""
    with _print_lock:
        (sys.stdout if stream is None else stream).write(text)


def device_text(device: Any) -> str:
    """A device as reports name it, `cpu:0`."""
    return f"{device.platform}:{device.id}" if hasattr(device, "platform") else str(device)


def _place_text(place: tuple[slice, ...]) -> str:
    # As it would be written to take that part of the whole: [0:2, 2:4].
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
            kwargs: the pairs.
            unflatten: makes the value from the message's arrays.
            output_stream: None means `sys.stdout` as it is when a message is printed.
            threshold: as in `format_value`.
            with_device: whether `device` is among the pairs.
        """
        self._kwargs = dict(kwargs)
        self._unflatten = unflatten
        self._stream = output_stream
        self._threshold = threshold
        self._with_device = with_device

    @property
    def is_portable(self) -> bool:
        """Whether another process, with the same standard output, would do."""
        return self._stream is None

    def __call__(self, message: Message) -> None:
        """Prints one message."""
        pairs: dict[str, Any] = dict(self._kwargs)
        if message.consumer.transforms:
            pairs["transforms"] = [
                (name, params) if params else name for name, params in message.consumer.transforms
            ]
        if self._with_device:
            pairs["device"] = message.device
        if message.shard_index is not None:
            pairs["device"] = device_text(message.device)
            pairs["index"] = " ".join(map(_place_text, message.shard_index))
        lines = [format_value(self._unflatten(message.arrays), self._threshold)]
        if pairs:
            lines.insert(0, " ".join(f"{key}: {value}" for key, value in sorted(pairs.items())))
        write_at_once(self._stream, "\n".join(lines) + "\n")
