"""The sink of a check: reports the failure and builds its explanation on demand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostcallback.receiver import limits
from hostcallback.receiver.failures.call_site import CallSite
from hostcallback.receiver.failures.explanation import CheckFailed, Explanation
from hostcallback.receiver.messages import Message
from hostcallback.receiver.sinks.batches import Batchings, elements
from hostcallback.receiver.sinks.printing import Template, place_text
from hostcallback.receiver.sinks.tap import Unflatten
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array

VALUE_CHARS = 200
"""Number of characters at which the texts of values are cut, to keep reports readable."""


class CheckSink:
    """Takes the messages of one check: arrays of the predicate, then of the arguments of its text."""

    __slots__ = ("_batchings", "_places", "_template", "_unflatten")

    def __init__(
        self, template: Template, unflatten: Unflatten, batchings: Batchings, places: Sequence[CallSite]
    ) -> None:
        """Makes the sink of one check.

        Args:
            template: formats its text.
            unflatten: makes `(predicate, args, kwargs)` from the arrays of one element.
            batchings: the vmaps around the check, see `batches.Batchings`.
            places: call sites at which it was traced; the sequence may grow.
        """
        self._template = template
        self._unflatten = unflatten
        self._batchings = batchings
        self._places = places

    def __call__(self, message: Message) -> None:
        """Takes one message.

        Raises:
            CheckFailed: always, unless the message is a shard in which the predicate holds. (It may fail only in the
                padding beyond the end of the array, which is cut off here.)
        """
        if message.shard_index is not None and message.arrays[0].all():
            return
        raise CheckFailed(message, self)

    def texts(self, message: Message) -> list[str]:
        """Returns the text of the failure that a message reports, as one line."""
        explained = self.explain(message)
        return [f"{explained.text} ({explained.where})" if explained.where else explained.text]

    def explain(self, message: Message) -> Explanation:
        """Returns the text with the values of the first failed element. Never raises: the text has any problem."""
        try:
            return self._explain(message)
        except Exception as error:
            problem = f"the message could not be made: {type(error).__name__}: {error}"
            return Explanation(self._template.fmt, {}, "", (), tuple(self._places), problem)

    def _explain(self, message: Message) -> Explanation:
        failing, total, index, arrays = self._first(message)
        predicate, args, kwargs = self._unflatten(arrays)
        args, kwargs = (
            [_readable(arg) for arg in args],
            {key: _readable(value) for key, value in kwargs.items()},
        )
        predicate = np.asarray(predicate)
        inside: tuple[int, ...] = ()
        where = []
        if self._batchings:
            where.append(f"{failing} of {total} batch elements failed, the first: {_index(index)}")
        if predicate.ndim:
            bad = np.argwhere(~predicate)
            inside = tuple(int(i) for i in bad[0])
            where.append(
                f"{len(bad):,} of {predicate.size:,} values are false, the first at {_index(inside)}"
            )
        if message.shard_index is not None and predicate.ndim:
            where.append(f"in the device's shard, {place_text(message.shard_index[0])}")
        with self._template.options():
            values = {
                **{str(i): _short(v) for i, v in enumerate(args)},
                **{k: _short(v) for k, v in kwargs.items()},
            }
            try:
                text, problem = self._fill(args, kwargs), ""
                if self._template.is_foreign:  # the report must not show a line that the check forged
                    text = printable(text)
            except Exception as error:
                text = self._template.fmt
                problem = f"the message could not be formatted: {type(error).__name__}: {error}"
        if self._template.is_foreign:
            text = text[: limits.REPORT_CHARS]
            values = dict(itertools.islice(values.items(), limits.REPORT_VALUES))
        return Explanation(text, values, "; ".join(where), (*index, *inside), tuple(self._places), problem)

    def _fill(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        present = self._template.present
        if present is None:
            return self._template.fill(args, kwargs)
        shown = {k: present(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
        return self._template.fill([present(a) if isinstance(a, np.ndarray) else a for a in args], shown)

    def _first(self, message: Message) -> tuple[int, int, tuple[int, ...], Sequence[Array]]:
        # Returns the numbers of failed and of all elements, and the index and the arrays of the first failed one.
        if not self._batchings:
            return 1, 1, (), message.arrays
        failing = total = 0
        first: tuple[tuple[int, ...], Sequence[Array]] | None = None
        most = self._template.most_elements
        for index, arrays in elements(message.arrays, self._batchings, message.shard_index, most):
            total += 1
            if not arrays[0].all():
                failing += 1
                if first is None or index < first[0]:
                    first = index, arrays
        index, arrays = first or ((), message.arrays)
        return failing, total, index, arrays


def _readable(value: Any, *, inside: bool = False) -> Any:
    # Returns numbers in containers as Python numbers, because numpy would show each as an array.
    if isinstance(value, np.ndarray) and inside and not value.ndim and value.dtype.kind in "biufc":
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(_readable(item, inside=True) for item in value)
    if type(value) is dict:
        return {key: _readable(item, inside=True) for key, item in value.items()}
    return value


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if not value.ndim:
            return str(value)
        text = " ".join(np.array2string(value, threshold=8, edgeitems=3, separator=", ").split())
        text += f" ({value.dtype}{list(value.shape)})"
    else:
        text = repr(value)
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."
