"""The taps of a log as data: `read`, and the messages of one tap as columns."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hostcallback.receiver import errors, tap_arguments, text
from hostcallback.receiver.log import logger
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.taplog.columns import tables
from hostcallback.receiver.taplog.columns.column_batches import ColumnBatch, ColumnReader, joined, layout_of
from hostcallback.receiver.taplog.columns.tables import Table
from hostcallback.receiver.taplog.format.layout import ALL_CONSUMERS, Kind
from hostcallback.receiver.taplog.reading.chunk_reader import Chunk
from hostcallback.receiver.taplog.reading.logged_message import LoggedTap
from hostcallback.receiver.taplog.reading.reader import LogReader, Paths
from hostcallback.receiver.taplog.reading.selection import Selection, unread_text
from hostcallback.receiver.text import table
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.tap_descriptor import PROGRESS, TapDescriptor, bar_names

BATCH_BYTES = 4 << 20
"""Bytes of a batch of `batches` from which on it is yielded."""

SHOWN = 10
"""Messages that a notebook shows of a tap."""

MAX_SEARCHED = 50
"""Number of taps among whose columns a name is looked for that no tap has."""


class TapData:
    """The messages of one tap in a log: iterated in batches, or converted.

    Attributes:
        name: the tap's name in this data.
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
        columns: tuple[str, ...] | None = None,
        limit: int | None = None,
    ) -> None:
        """Called by `read` and `select`."""
        self.name = name
        self.source_lines = sorted({each.source_line for each in described})
        self.kinds = sorted({each.kind for each in described})
        self._reader = reader
        self._described = described
        self._is_bar = _is_bar(described[0])
        self._selection = selection or Selection(names=(glob.escape(described[0].name),))
        self._columns = columns
        self._limit = limit

    def __repr__(self) -> str:
        """Name and source lines."""
        return f"TapData({self.name!r}, {', '.join(self.source_lines)})"

    def _repr_html_(self) -> str:
        # The first messages: the others are not read.
        limit = SHOWN if self._limit is None else min(SHOWN, self._limit)
        shown = TapData(self._reader, self.name, self._described, self._selection, self._columns, limit)
        parts = [text.preformatted(repr(self))]
        for found in shown.tables():
            columns = tables.to_numpy(found)
            numbers = {name: values for name, values in columns.items() if values.ndim == 1}
            parts.append(text.table(list(numbers), zip(*numbers.values(), strict=True)))
            for name, values in columns.items():
                if values.ndim > 1:
                    parts += [text.preformatted(name), text.array(values)]
        return "\n".join([*parts, text.preformatted(f"at most the first {SHOWN} messages")])

    @hide_frames
    def __getitem__(self, name: Any) -> NoReturn:
        """Refuses it: columns are items of what the messages are converted to.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self.name!r} is a tap, and its columns are in what it is converted to: "
            f"data[{self.name!r}].to_numpy()[{name!r}], or .to_pandas()[{name!r}]"
        )

    @hide_frames
    def select(
        self,
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        device: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> TapData:
        """Returns the same tap with fewer messages or columns. What is left out is not read, as far as the log allows.

        Args:
            first_step: first step; messages without a step are left out.
            last_step: last step.
            device: name of a device, such as "cpu:0".
            columns: names of leaves; the others are not copied.
            limit: largest number of messages, the first ones of the log; reading ends there.

        Raises:
            TypeError: `columns` is a text, or `limit` no whole number.
            ValueError: `limit` is negative; there is no column of a name, in the first of these messages, or (while
                they are read) in a later one.
        """
        if isinstance(columns, str):
            raise TypeError(f"columns is {columns!r}, expected a list of names: columns=[{columns!r}]")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"limit is {limit!r}, expected a whole number of messages, or None")
        if limit is not None and limit < 0:
            raise ValueError(f"limit is {limit}, expected a number of messages, 0 or more")
        devices = self._selection.devices if device is None else (device,)
        selection = dataclasses.replace(
            self._selection, first_step=first_step, last_step=last_step, devices=devices
        )
        chosen = self._columns if columns is None else tuple(columns)
        selected = TapData(
            self._reader, self.name, self._described, selection, chosen,
            self._limit if limit is None else limit,
        )  # fmt: skip
        if columns is not None:
            next(selected._raw(), None)
        return selected

    def _column_names(self) -> list[str]:
        # Of the first message, without `step` and `time`; empty if there is none.
        batch = next(self._raw(), None)
        return [] if batch is None else Table.of(self.name, [batch]).names

    def batches(self) -> Iterator[ColumnBatch]:
        """Yields the messages in batches of about 4 MiB, those of a device in order. Memory is bounded by a batch."""
        gathered: list[ColumnBatch] = []
        nbytes = 0
        for batch in self._raw():
            if gathered and (not _same(gathered[-1], batch) or nbytes > BATCH_BYTES):
                yield joined(gathered)
                gathered, nbytes = [], 0
            gathered.append(batch)
            nbytes += batch.nbytes
        if gathered:
            yield joined(gathered)

    def __iter__(self) -> Iterator[ColumnBatch]:
        return self.batches()

    def _raw(self) -> Iterator[ColumnBatch]:
        # Values of which each process has some shards are assembled message by message.
        whole = any(each.shards is not None for each in self._described)
        name, is_bar, left = self._described[0].name, self._is_bar, self._limit
        found = ColumnReader(self._reader).batches(
            lambda described, tap: tap == name and _is_bar(described) == is_bar, self._selection, whole=whole
        )
        while left is None or left > 0:
            batch = next(found, None)
            if batch is None:
                return
            batch = batch if self._columns is None else self._chosen(batch)
            if left is not None:
                batch = batch.first(left)
                left -= len(batch)
            yield batch

    def _chosen(self, batch: ColumnBatch) -> ColumnBatch:
        kept = tables.kept_columns(batch.columns)
        names = tables.column_names(self.name, [batch.columns[place] for place in kept])
        missing = [name for name in self._columns or () if name not in names]
        if missing:
            raise ValueError(
                f"the tap {self.name!r} has no column {missing[0]!r}; it has {', '.join(map(repr, names))}"
            )
        places = [kept[names.index(name)] for name in self._columns or ()]
        # Copies, so that the other columns' memory is free.
        columns = tuple(batch.columns[place] for place in places)
        return ColumnBatch(columns, *batch[1:6], tuple(batch.values[place].copy() for place in places))

    def tables(self) -> list[Table]:
        """Reads all messages, into one table per layout: per shapes and dtypes of the tapped leaves.

        Integers that crossed 2**31, of which JAX makes int64 then, are one column of int64.
        """
        found: dict[Any, tables.TableBuilder] = {}
        for batch in self._raw():
            layout = layout_of(batch.columns)
            builder = found.get(layout)
            if builder is None:
                builder = found[layout] = tables.TableBuilder(self.name, batch.columns)
            builder.add(batch)
        return [builder.table() for builder in found.values()]

    @hide_frames
    def to_numpy(self) -> dict[str, Array]:
        """Reads all messages, as an array per column: `step`, `time`, and one per leaf, of shape (messages, *lanes,
        *shape).

        If messages have no step, the steps are a `numpy.ma.MaskedArray`, in which theirs are masked.

        Raises:
            ValueError: messages have different layouts.
        """
        return tables.to_numpy(self._one_table())

    @hide_frames
    def to_pandas(self) -> Any:
        """Reads all messages, as a `pandas.DataFrame`: a row per message and vmap lane.

        Columns are `step`, `time`, `device` and, with several processes, `process`; `lane` (or `lane0`, `lane1`, the
        outermost vmap first) under vmap; and one per leaf, whose cells are numbers or arrays. Messages of several
        layouts share the frame.

        Raises:
            HostCallbackError: the package pandas is missing.
        """
        return tables.to_pandas(self.tables(), self.name)

    @hide_frames
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

    @hide_frames
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


def _is_bar(described: TapDescriptor | None) -> bool:
    return described is not None and described.tap_kind is PROGRESS


def _same(one: ColumnBatch, other: ColumnBatch) -> bool:
    return one[:3] == other[:3]


class UnknownTapError(errors.HostCallbackError, KeyError):
    """A log does not have the tap; the text lists those that it has.

    Example:
        with contextlib.suppress(hcb.UnknownTapError):
            hcb.read("run/taps")["los"]
    """

    def __str__(self) -> str:
        """The text, which KeyError would quote."""
        return str(self.args[0])


class LogData(Mapping[str, TapData]):
    """The taps of a log by name, each with its messages as columns. Made by `read` and `capture`.

    Nothing is read before it is needed. Each conversion reads the messages again. A progress bar that shares the name
    of other taps, say "train", is called "train (progress)".

    Example:
        print(sorted(hcb.read("run/taps")))
    """

    def __init__(self, reader: LogReader) -> None:
        """`reader` has the log open."""
        self._reader = reader
        self._taps: dict[str, list[TapDescriptor]] | None = None
        self._bars: dict[str, str] = {}

    def _described(self) -> dict[str, list[TapDescriptor]]:
        if self._taps is None:
            found: dict[str, dict[int, TapDescriptor]] = {}
            carried = False  # whether messages may carry their descriptors, as those of exported programs do
            for _, segment in self._reader.segments():
                for chunk in segment.chunks():  # reading the chunks collects the descriptors
                    if isinstance(chunk, Chunk) and chunk.kind is Kind.FRAMES:
                        carried |= chunk.consumers == ALL_CONSUMERS
                for _, described in segment.consumers.values():
                    found.setdefault(described.name, {})[described.consumer_id] = described
            for described in ColumnReader(self._reader).exported() if carried else ():
                found.setdefault(described.name, {})[described.consumer_id] = described
            taps: dict[bool, dict[str, list[TapDescriptor]]] = {True: {}, False: {}}  # bars, others
            for name in sorted(found):
                for described in found[name].values():
                    taps[_is_bar(described)].setdefault(name, []).append(described)
            bars, others = taps[True], taps[False]
            self._bars = bar_names(bars.keys(), others.keys())
            called = {self._bars.get(name, name): bars[name] for name in bars}
            self._taps = dict(sorted((others | called).items()))
        return self._taps

    def _name_of(self, tap: LoggedTap) -> str:
        name = tap.consumer.name
        if not _is_bar(tap.described):
            return name
        self._described()
        return self._bars.get(name, name)

    def _tap(self, name: str) -> TapData:
        return TapData(self._reader, name, self._described()[name])

    @hide_frames
    def __getitem__(self, name: str) -> TapData:
        """The tap of that name; the name of an unnamed tap may be given without its line, if there is only one.

        Raises:
            UnknownTapError: there is no such tap, or several; the text lists what there is.
        """
        taps = self._described()
        near = self._called(name)
        if len(near) == 1:
            return self._tap(near[0])
        there = ", ".join(map(repr, taps)) or "none"
        if not near and (owner := self._owner(name)) is not None:
            raise UnknownTapError(
                f"the log has no tap {name!r}; {name!r} is a column of {owner!r}: data[{owner!r}].to_numpy()[{name!r}]"
            )
        if near:
            some = ", ".join(map(repr, near[:8])) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
            raise UnknownTapError(
                f"{name!r} matches {some}, and this gives one tap: give a whole name, as in data[{near[0]!r}], or take "
                "several: {name: data[name] for name in data}"
            )
        similar = difflib.get_close_matches(str(name), [*taps], n=1)
        meant = f" Did you mean {similar[0]!r}?" if similar else ""
        raise UnknownTapError(f"the log has no tap {name!r}; its taps are {there}.{meant}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and len(self._called(name)) == 1

    def _called(self, name: str) -> list[str]:
        # The taps that are meant by a name.
        taps = self._described()
        return [name] if name in taps else [known for known in taps if tap_arguments.matches(known, name)]

    def _owner(self, column: str) -> str | None:
        # The first tap that has a column of that name.
        some = list(self._described())[:MAX_SEARCHED]
        return next((name for name in some if column in self._tap(name)._column_names()), None)

    @hide_frames
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(TapData, name):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        taps = list(self)
        raise AttributeError(
            f"{name} is of one tap: data[{(taps or ['loss'])[0]!r}].{name}(...); "
            f"the taps are {', '.join(map(repr, taps)) or 'none'}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._described())

    def __len__(self) -> int:
        return len(self._described())

    def __repr__(self) -> str:
        """The names of the taps."""
        return f"LogData({', '.join(map(repr, self._described()))})"

    def _repr_html_(self) -> str:
        rows = [(name, ", ".join(tap.kinds), "\n".join(tap.source_lines)) for name, tap in self.items()]
        return table(("tap", "kind", "line"), rows)


def naming(reader: LogReader) -> Callable[[LoggedTap], str]:
    """Returns the function that returns what a tap of a log is called in the data that `read` returns."""
    return LogData(reader)._name_of


@hide_frames
def read(paths: Paths, *, run: str | None = None) -> LogData:
    """Opens tap logs as data: a mapping of taps by name, each with its messages as columns.

    Logs that are larger than memory can be read: `data[name]` is iterated in batches, and converted to Arrow batch by
    batch. Works without JAX, while the program still writes, and after it was killed.

    Args:
        paths: folder of a log (`record=` of a receiver), a segment, or several of them.
        run: of a folder with several runs, the name of one, a pattern, or "all"; None for the last one.

    Raises:
        NotATapLogError: a path is not a log.
        NoSuchRunError: no run has that name.
        OSError: a path cannot be read.

    Example:
        data = hcb.read("logs")
        data["loss"].to_pandas().plot(x="step", y="loss")
    """
    reader = LogReader(paths, run=run)
    if run is None:
        choose = "run=NAME reads another, run='all' all of them"
        _say_once(unread_text(reader.runs, {writer.run for writer in reader.writers}, choose))
    return LogData(reader)


@functools.lru_cache(maxsize=256)
def _say_once(unread: str) -> None:
    if unread:
        logger.warning("hcb.read: %s", unread)
