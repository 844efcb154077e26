"""The messages of one tap as columns."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.columns import tables
from hostcallback.receiver.taplog.columns.column_batches import ColumnBatch, ColumnReader
from hostcallback.receiver.taplog.columns.tables import Table
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

BATCH_BYTES = 4 << 20
"""Bytes of a batch of `batches` from which on it is yielded."""


class TapData:
    """The messages of one tap in a log: iterated in batches, or converted.

    Attributes:
        name: the tap's name.
        source_lines: where it was traced.
        kinds: its kinds, such as "tap" or "metrics".

    Example:
        print(hcb.read("run/taps")["loss"].to_numpy())
    """

    def __init__(
        self,
        reader: LogReader,
        name: str,
        described: Sequence[TapDescriptor],
        selection: Selection | None = None,
    ) -> None:
        """Called by `read`."""
        self.name = name
        self.source_lines = sorted({each.source_line for each in described})
        self.kinds = sorted({each.kind for each in described})
        self._reader = reader
        self._described = described
        self._selection = selection or Selection(names=(glob.escape(name),))

    def __repr__(self) -> str:
        """Name and source lines."""
        return f"TapData({self.name!r}, {', '.join(self.source_lines)})"

    def select(
        self, *, first_step: int | None = None, last_step: int | None = None, device: str | None = None
    ) -> TapData:
        """Returns the same tap with fewer messages: steps from `first_step` to `last_step`, or of one device."""
        devices = self._selection.devices if device is None else (device,)
        selection = dataclasses.replace(
            self._selection, first_step=first_step, last_step=last_step, devices=devices
        )
        return TapData(self._reader, self.name, self._described, selection)

    def batches(self) -> Iterator[ColumnBatch]:
        """Yields the messages in batches of about 4 MiB, those of a device in order. Memory is bounded by a batch."""
        gathered: list[ColumnBatch] = []
        nbytes = 0
        for batch in self._raw():
            if gathered and (not _same(gathered[-1], batch) or nbytes > BATCH_BYTES):
                yield _joined(gathered)
                gathered, nbytes = [], 0
            gathered.append(batch)
            nbytes += batch.nbytes
        if gathered:
            yield _joined(gathered)

    def __iter__(self) -> Iterator[ColumnBatch]:
        return self.batches()

    def _raw(self) -> Iterator[ColumnBatch]:
        # Values of which each process has some shards are assembled message by message.
        whole = any(each.shards is not None for each in self._described)
        name = self.name
        yield from ColumnReader(self._reader).batches(
            lambda described, tap: tap == name, self._selection, whole=whole
        )

    def tables(self) -> list[Table]:
        """Reads all messages, into one table per layout: per shapes and dtypes of the tapped leaves."""
        found: dict[Any, list[ColumnBatch]] = {}
        for batch in self._raw():
            found.setdefault(batch.columns, []).append(batch)
        return [Table.of(self.name, batches) for batches in found.values()]

    def to_numpy(self) -> dict[str, Array]:
        """Reads all messages, as an array per column: `step`, `time`, and one per leaf, of shape (messages, *lanes,
        *shape).

        Raises:
            ValueError: messages have different layouts.
        """
        return tables.to_numpy(self._one_table())

    def to_pandas(self) -> Any:
        """Reads all messages, as a `pandas.DataFrame`: a row per message and vmap lane.

        Columns are `step`, `time`, `device` and, with several processes, `process`; `lane` (or `lane0`, `lane1`, the
        outermost vmap first) under vmap; and one per leaf, whose cells are numbers or arrays. Messages of several
        layouts share the frame.

        Raises:
            HostCallbackError: the package pandas is missing.
        """
        return tables.to_pandas(self.tables(), self.name)

    def to_xarray(self) -> Any:
        """Reads all messages, as an `xarray.Dataset` with a variable per leaf.

        Dimensions are `step` (if no two messages have the same step, else `message`, with the steps as a coordinate),
        `device` (if several devices sent the same steps), `lane` under vmap, and `NAME_0`, `NAME_1` of each leaf's
        shape.

        Raises:
            HostCallbackError: the package xarray is missing.
            ValueError: messages have different layouts.
        """
        return tables.to_xarray(self._one_table())

    def to_arrow(self) -> Any:
        """Returns a `pyarrow.RecordBatchReader`, which reads batch by batch; `.read_all()` makes it a table.

        A row is a message. A leaf of numbers is a column of them; others are columns of fixed-shape tensors, with the
        vmap lanes as first axes.

        Raises:
            HostCallbackError: the package pyarrow is missing.
            ValueError: messages have different layouts (while reading).
        """
        return tables.to_arrow(self.batches(), self.name)

    def _one_table(self) -> Table:
        found = self.tables()
        if len(found) > 1:
            raise ValueError(
                f"messages of {self.name!r} have {len(found)} layouts: "
                f"{'; '.join(table.layout_text for table in found)}. Take them one by one, from tables(), or "
                "to_pandas()"
            )
        return found[0] if found else Table.of(self.name, [])


def _same(one: ColumnBatch, other: ColumnBatch) -> bool:
    return one[:3] == other[:3]


def _joined(batches: list[ColumnBatch]) -> ColumnBatch:
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    steps, times, seqs = (np.concatenate([batch[place] for batch in batches]) for place in (3, 4, 5))
    values = tuple(np.concatenate(parts) for parts in zip(*[batch.values for batch in batches], strict=True))
    return ColumnBatch(first.columns, first.process, first.device, steps, times, seqs, values)
