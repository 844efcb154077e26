"""Tables of messages of one layout, and their conversion for numpy, pandas, xarray and Arrow."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcallback.receiver import errors, tap_arguments
from hostcallback.receiver.taplog.columns.column_batches import Column, ColumnBatch, wider
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.render import plain_array
from hostcallback.receiver.wire.array_types import Array

_TAKEN = ("step", "time", "device", "process", "seq", "message")
"""Names of columns that are no leaves. A leaf of such a name, or of a lane's, is called with `_value` after it."""


class _Growing:
    # A column that grows. Its memory is extended in place, which for a large one copies nothing: joining parts at the
    # end would need both at once.

    def __init__(self, first: Array) -> None:
        self._array = np.empty((0, *first.shape[1:]), first.dtype)
        self._used = 0

    def add(self, part: Array) -> None:
        if part.dtype.itemsize > self._array.dtype.itemsize:
            self._array = self._array.astype(part.dtype)
        end = self._used + len(part)
        if end > len(self._array):
            self._resize(max(end, len(self._array) * 9 // 8))
        self._array[self._used : end] = part
        self._used = end

    def whole(self) -> Array:
        self._resize(self._used)
        return self._array

    def _resize(self, length: int) -> None:
        self._array.resize((length, *self._array.shape[1:]), refcheck=False)


class TableBuilder:
    """Joins batches of one layout into a table. Memory is that of the table, with an eighth of a column to grow."""

    def __init__(self, tap: str, columns: Sequence[Column]) -> None:
        """`tap` is the tap's name, `columns` the layout of the batches."""
        self._kept = kept_columns(columns)
        self._columns = tuple(columns[place] for place in self._kept)
        self._names = column_names(tap, self._columns)
        self._grown: list[_Growing] = []
        self._origins: list[tuple[str, int]] = []
        self._sizes: list[int] = []

    def add(self, batch: ColumnBatch) -> None:
        """Takes a copy of the next batch."""
        self._columns = wider(self._columns, [batch.columns[place] for place in self._kept])
        values = (plain_array(batch.values[place]) for place in self._kept)
        parts = [batch.steps, batch.times_ns, *values]
        self._grown = self._grown or [_Growing(part) for part in parts]
        for column, part in zip(self._grown, parts, strict=True):
            column.add(part)
        self._origins.append((batch.device, batch.process))
        self._sizes.append(len(batch))

    def table(self) -> Table:
        """The table of all batches so far; to be called once."""
        devices = list(dict.fromkeys(device for device, _ in self._origins))
        number = {device: n for n, device in enumerate(devices)}
        origins = [(number[device], process) for device, process in self._origins]
        empty = np.empty(0, np.int64)
        steps, times_ns, *values = [column.whole() for column in self._grown] or [empty, empty]
        return Table(
            self._names, self._columns, steps, times_ns, devices,
            np.array(origins, np.int64).reshape(-1, 2), self._sizes, values,
        )  # fmt: skip


@dataclass(slots=True)
class Table:
    """Messages of one tap and layout.

    Attributes:
        names: names of the leaves' columns.
        columns: layout of the leaves.
        steps: int64, shape (messages,), or `NO_STEP`.
        times_ns: Unix nanoseconds, int64, shape (messages,).
        devices: names of the devices.
        origins: for messages that follow each other, the index into `devices` and that of the process.
        sizes: the number of these messages.
        values: an array per leaf: shape (messages, *lanes, *shape).
    """

    names: list[str]
    columns: tuple[Column, ...]
    steps: Array
    times_ns: Array
    devices: list[str]
    origins: Array
    sizes: list[int]
    values: list[Array]

    @classmethod
    def of(cls, tap: str, batches: Sequence[ColumnBatch]) -> Table:
        """Joins batches of one layout."""
        builder = TableBuilder(tap, batches[0].columns if batches else ())
        for batch in batches:
            builder.add(batch)
        return builder.table()

    @property
    def device(self) -> Array:
        """Index into `devices` of each message, int64, shape (messages,). Made when it is asked for."""
        return np.repeat(self.origins[:, 0], self.sizes)

    @property
    def processes(self) -> Array:
        """Index of the process of each message, int64, shape (messages,). Made when it is asked for."""
        return np.repeat(self.origins[:, 1], self.sizes)

    @property
    def lanes(self) -> tuple[int, ...]:
        """Number of lanes of each vmap, the outermost first."""
        levels = max((len(column.lanes) for column in self.columns), default=0)
        return tuple(
            max(column.lanes[level] for column in self.columns if len(column.lanes) > level)
            for level in range(levels)
        )

    @property
    def layout_text(self) -> str:
        """The layout in words: `loss float32[3]`."""
        return ", ".join(
            f"{name} {column.dtype.name}[{','.join(map(str, (*column.lanes, *column.shape)))}]"
            for name, column in zip(self.names, self.columns, strict=True)
        )

    @property
    def times(self) -> Array:
        """Emission times in UTC, datetime64[ns]; the same memory."""
        return self.times_ns.view("datetime64[ns]")


def kept_columns(columns: Sequence[Column]) -> list[int]:
    """Indices of the leaves that get a column: all but the step of the message, which every table has."""
    return [place for place, column in enumerate(columns) if not column.is_step]


def column_names(tap: str, columns: Sequence[Column]) -> list[str]:
    """Names of the leaves' columns: those of the leaves, or of the tap where an array alone was tapped."""
    names: list[str] = []
    for column in columns:
        name = column.name or tap_arguments.base_name(tap)
        while (
            name in _TAKEN
            or name in names
            or (name.startswith("lane") and name[4:].isdigit())
            or name == "lane"
        ):
            name += "_value"
        names.append(name)
    return names


def to_numpy(table: Table) -> dict[str, Array]:
    """Returns the columns of a table; the steps as a masked array if messages have none."""
    missing = table.steps == NO_STEP
    steps = np.ma.masked_array(table.steps, missing, fill_value=-1) if missing.any() else table.steps
    return {"step": steps, "time": table.times, **dict(zip(table.names, table.values, strict=True))}


def to_pandas(tables: Sequence[Table], tap: str) -> Any:
    """Returns a frame with the rows of all tables."""
    pandas = optional("pandas", "data")
    many = len({process for table in tables for process in table.origins[:, 1].tolist()}) > 1
    frames = [_frame(pandas, table, many) for table in tables]
    if len(frames) == 1:
        return frames[0]
    return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame({"step": [], "time": []})


def _frame(pandas: Any, table: Table, with_process: bool) -> Any:
    lanes, messages = table.lanes, len(table.steps)
    each = math.prod(lanes)
    columns: dict[str, Any] = {
        "step": _steps(pandas, np.repeat(table.steps, each)),
        "time": np.repeat(table.times, each),
        "device": pandas.Categorical.from_codes(np.repeat(table.device, each), table.devices),
    }
    if with_process:
        columns["process"] = np.repeat(table.processes, each)
    for name, numbers in zip(lane_names(lanes), _lane_numbers(lanes), strict=True):
        columns[name] = np.tile(numbers, messages)
    for name, column, values in zip(table.names, table.columns, table.values, strict=True):
        rows = np.broadcast_to(values, (messages, *lanes, *column.shape)).reshape(
            messages * each, *column.shape
        )
        columns[name] = rows if not column.shape else _cells(rows)
    frame = pandas.DataFrame(columns)
    frame["time"] = frame["time"].dt.tz_localize("UTC")
    return frame


def _steps(pandas: Any, steps: Array) -> Any:
    missing = steps == NO_STEP
    return pandas.arrays.IntegerArray(steps, missing) if missing.any() else steps


def _cells(rows: Array) -> Array:
    cells = np.empty(len(rows), object)
    cells[:] = list(rows)
    return cells


def lane_names(lanes: Sequence[int]) -> list[str]:
    """Names of the dimensions of vmap lanes."""
    return ["lane"] if len(lanes) == 1 else [f"lane{level}" for level in range(len(lanes))]


def _lane_numbers(lanes: Sequence[int]) -> list[Array]:
    return [grid.reshape(-1) for grid in np.indices(lanes)] if lanes else []


def to_xarray(table: Table) -> Any:
    """Returns a dataset with a variable per leaf."""
    xarray = optional("xarray", "data")
    lead, coordinates, order = _lead(table)
    sizes = [len(coordinates[dim][1]) if dim in coordinates else len(table.steps) for dim in lead]
    names = lane_names(table.lanes)
    variables = {}
    for name, column, values in zip(table.names, table.columns, table.values, strict=True):
        used = [level for level, count in enumerate(column.lanes) if count == table.lanes[level]]
        shape = [column.lanes[level] for level in used]
        shaped = values[order] if order is not None else values
        dims = [*lead, *(names[level] for level in used), *(f"{name}_{i}" for i in range(len(column.shape)))]
        variables[name] = dims, shaped.reshape(*sizes, *shape, *column.shape)
    if len(lead) == 1:
        coordinates["time"] = lead, table.times
    return xarray.Dataset(variables, coordinates)


def _lead(table: Table) -> tuple[list[str], dict[str, Any], Array | None]:
    # The leading dimensions, their coordinates, and the order in which messages fill them (None for their own).
    steps, count = table.steps, len(table.steps)
    devices = len(table.devices)
    if count and (steps != NO_STEP).all():
        if (np.diff(steps) > 0).all():
            return ["step"], {"step": ("step", steps)}, None
        # Not np.unique, whose hash table takes a second for a million steps.
        sorting = np.argsort(steps, kind="stable")
        ordered = steps[sorting]
        unique = ordered[np.concatenate([[True], np.diff(ordered) > 0])]
        if len(unique) == count:
            return ["step"], {"step": ("step", ordered)}, sorting
        if devices > 1 and len(unique) * devices == count:
            order = np.lexsort((table.device, steps))
            grid = steps[order].reshape(len(unique), devices)
            if (grid == unique[:, np.newaxis]).all():
                return (
                    ["step", "device"],
                    {"step": ("step", unique), "device": ("device", table.devices)},
                    order,
                )
    coordinates: dict[str, Any] = {"device": ("message", np.array(table.devices)[table.device])}
    if count and (steps != NO_STEP).any():
        coordinates["step"] = "message", steps
    return ["message"], coordinates, None


def to_arrow(batches: Iterator[ColumnBatch], tap: str) -> Any:
    """Returns a reader of record batches."""
    arrow = optional("pyarrow", "data")
    first = next(batches, None)
    made = None if first is None else _record_batch(arrow, tap, first)
    schema = (
        arrow.schema([("step", arrow.int64()), ("time", arrow.timestamp("ns", "UTC"))])
        if made is None
        else made.schema
    )

    def rest() -> Iterator[Any]:
        if made is None or first is None:
            return
        yield made
        for batch in batches:
            if batch.columns != first.columns:
                texts = [Table.of(tap, [each]).layout_text for each in (first, batch)]
                raise ValueError(
                    f"messages of {tap!r} have several layouts: {'; '.join(texts)}. Take them from tables(), or "
                    "to_pandas()"
                )
            yield _record_batch(arrow, tap, batch)

    return arrow.RecordBatchReader.from_batches(schema, rest())


def _record_batch(arrow: Any, tap: str, batch: ColumnBatch) -> Any:
    table = Table.of(tap, [batch])
    missing = table.steps == NO_STEP
    arrays = {
        "step": arrow.array(table.steps, mask=missing if missing.any() else None),
        "time": arrow.array(table.times_ns).cast(arrow.timestamp("ns", "UTC")),
        "device": arrow.array([batch.device]).take(arrow.array(np.zeros(len(batch), np.int64))),
        "process": arrow.array(table.processes),
    }
    for name, values in zip(table.names, table.values, strict=True):
        flat = np.ascontiguousarray(values)
        if flat.dtype.kind == "c":  # real and imaginary part are a last axis
            flat = flat.view(flat.real.dtype).reshape(*flat.shape, 2)
        if flat.ndim == 1:
            arrays[name] = arrow.array(flat)
        else:
            arrays[name] = _tensors(arrow, flat)
    return arrow.record_batch(arrays)


def _tensors(arrow: Any, flat: Array) -> Any:
    if flat.size:
        return arrow.FixedShapeTensorArray.from_numpy_ndarray(flat)
    # pyarrow refuses arrays without elements there.
    kind = arrow.from_numpy_dtype(flat.dtype)
    empty = arrow.array([[]] * len(flat), arrow.list_(kind, math.prod(flat.shape[1:])))
    return arrow.ExtensionArray.from_storage(arrow.fixed_shape_tensor(kind, flat.shape[1:]), empty)


def optional(package: str, extra: str) -> Any:
    """Imports a package, or a module of one, that is an extra.

    Raises:
        HostCallbackError: it is missing; the text has the command that installs it.
    """
    try:
        importlib.import_module(package.partition(".")[0])  # a module of it may be loaded without it
        return importlib.import_module(package)
    except ImportError as error:
        raise errors.HostCallbackError(
            f"this needs the package {package.partition('.')[0]}: pip install 'hostcallback[{extra}]'"
        ) from error
