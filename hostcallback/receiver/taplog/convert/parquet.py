"""Converts to Parquet: one row per array of each message, with the same columns for all taps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.convert.output import ConvertError, plain_array
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.render.json import process_text
from hostcallback.receiver.taplog.render.text import Leaf, LoggedLeaves
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.truncation import TruncatedArray

ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 1 << 15


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConvertError(
            "a Parquet file needs the package pyarrow: pip install 'hostcallback[parquet]'"
        ) from error
    return pyarrow


def _schema(pa: Any) -> Any:
    # Documented in docs/convert.md.
    return pa.schema(
        [
            ("time", pa.timestamp("ns", tz="UTC")),
            ("process", pa.string()),
            ("device", pa.string()),
            ("seq", pa.uint64()),
            ("step", pa.int64()),
            ("name", pa.string()),
            ("kind", pa.string()),
            ("source_line", pa.string()),
            ("run_id", pa.int64()),
            ("folded", pa.uint64()),
            ("leaf", pa.string()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("whole_shape", pa.list_(pa.int64())),
            ("start", pa.list_(pa.int64())),
            ("value", pa.float64()),
            ("floats", pa.list_(pa.float64())),
            ("integers", pa.list_(pa.int64())),
            ("unsigned", pa.list_(pa.uint64())),
        ]
    )


class ParquetConversion:
    """Writes a Parquet file, one row group at a time."""

    def __init__(self, path: Path) -> None:
        """Starts the file.

        Raises:
            ConvertError: pyarrow is missing.
        """
        self._pa = _pyarrow()
        self._schema = _schema(self._pa)
        self._writer = self._pa.parquet.ParquetWriter(str(path), self._schema)
        self._leaves = LoggedLeaves()
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def message(self, logged: LoggedMessage) -> None:
        """Adds a row per array; one row without a leaf if the message has no array."""
        message, described = logged.message, logged.tap.described
        common = {
            "time": message.time_ns,
            "process": process_text(logged.writer),
            "device": message.device,
            "seq": message.seq,
            "step": logged.step,
            "name": message.consumer.name,
            "kind": None if described is None else described.kind,
            "source_line": message.consumer.source_line,
            "run_id": message.run_id,
            "folded": logged.folded,
        }
        leaves = self._leaves.of(logged)
        for leaf in leaves:
            self._rows.append(common | _columns(leaf))
            self._bytes += leaf.array.size * 8
        if not leaves:
            self._rows.append(common)
        if self._bytes > ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()

    def lost(self, run: LostRun) -> None:
        """Does nothing: rows are arrays only."""

    def finish(self) -> None:
        """Writes the remaining rows and the file's index."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = [
            self._lists(field) if self._pa.types.is_list(field.type) else self._scalars(field)
            for field in self._schema
        ]
        self._writer.write_batch(self._pa.record_batch(columns, schema=self._schema))
        self._rows.clear()
        self._bytes = 0

    def _scalars(self, field: Any) -> Any:
        return self._pa.array([row.get(field.name) for row in self._rows], field.type)

    def _lists(self, field: Any) -> Any:
        # Through numpy: a Python object per element would need ten times the memory.
        lists = [row.get(field.name) for row in self._rows]
        missing = np.array([items is None for items in lists])
        offsets = np.cumsum([0, *(0 if items is None else len(items) for items in lists)])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ConvertError("an array has more elements than a Parquet list can hold, 2**31 - 1")
        dtype = field.type.value_type.to_pandas_dtype()
        there = [np.asarray(items, dtype) for items in lists if items is not None]
        values = np.concatenate(there) if there else np.empty(0, dtype)
        return self._pa.ListArray.from_arrays(
            self._pa.array(offsets, self._pa.int32()), self._pa.array(values), mask=self._pa.array(missing)
        )


def _columns(leaf: Leaf) -> dict[str, Any]:
    array = plain_array(leaf.array)
    whole = leaf.array.whole_shape if isinstance(leaf.array, TruncatedArray) else None
    is_scalar = not array.ndim and array.dtype.kind != "c"
    return {
        "leaf": leaf.name,
        "dtype": leaf.array.dtype.name,
        "shape": array.shape,
        "whole_shape": whole,
        "start": None if leaf.place is None else [part.start for part in leaf.place],
        "value": float(array) if is_scalar else None,
        **_elements(array.reshape(-1)),
    }


def _elements(flat: Array) -> dict[str, Array]:
    if flat.dtype.kind == "c":  # real and imaginary parts alternate
        return {"floats": np.ascontiguousarray(flat, np.complex128).view(np.float64)}
    if flat.dtype.kind == "f":
        return {"floats": flat}
    return {"unsigned": flat} if flat.dtype == np.uint64 else {"integers": flat}
