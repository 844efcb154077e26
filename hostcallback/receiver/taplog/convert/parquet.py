"""Converts to Parquet: one row per array of each message, with the same columns for all taps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.taplog.columns.column_batches import AlikeMessages
from hostcallback.receiver.taplog.columns.tables import optional
from hostcallback.receiver.taplog.convert.output import ConvertError
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.logged_message import LoggedTap
from hostcallback.receiver.taplog.render import plain_array, process_text
from hostcallback.receiver.wire.array_types import Array

ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 1 << 15


def write_parquet(messages: Iterable[AlikeMessages], path: Path, name_of: Callable[[LoggedTap], str]) -> None:
    """Writes a Parquet file, one row group at a time. `name_of` returns what a tap is called in it.

    Raises:
        HostCallbackError: pyarrow is missing.
        ConvertError: an array is too large.
    """
    pa, parquet = optional("pyarrow", "parquet"), optional("pyarrow.parquet", "parquet")
    texts, lists = pa.string(), pa.list_(pa.int64())
    # Documented in docs/convert.md.
    schema = pa.schema(
        {
            "time": pa.timestamp("ns", tz="UTC"), "process": texts, "device": texts, "seq": pa.uint64(),
            "step": pa.int64(), "name": texts, "kind": texts, "source_line": texts, "run_id": pa.int64(),
            "folded": pa.uint64(), "leaf": texts, "dtype": texts, "shape": lists, "whole_shape": lists,
            "start": lists, "value": pa.float64(), "floats": pa.list_(pa.float64()), "integers": lists,
            "unsigned": pa.list_(pa.uint64()),
        }
    )  # fmt: skip
    with parquet.ParquetWriter(str(path), schema) as writer:
        gathered: dict[Any, list[AlikeMessages]] = {}
        rows = nbytes = 0
        for alike in messages:
            gathered.setdefault(alike.layout, []).append(alike)
            rows += alike.messages * max(1, len(alike.leaves))
            nbytes += sum(array.size * 8 for array in alike.arrays)
            if nbytes > ROW_GROUP_BYTES or rows >= ROW_GROUP_ROWS:
                writer.write_table(_table(pa, schema, gathered.values(), name_of), ROW_GROUP_ROWS)
                gathered.clear()
                rows = nbytes = 0
        if gathered:
            writer.write_table(_table(pa, schema, gathered.values(), name_of), ROW_GROUP_ROWS)


def _table(
    pa: Any, schema: Any, groups: Iterable[list[AlikeMessages]], name_of: Callable[[LoggedTap], str]
) -> Any:
    # The rows of some messages, in order of time.
    keys, parts = [], []
    for group in groups:
        fields = _fields(pa, group, name_of(group[0].tap))
        times, seqs = (
            np.concatenate([getattr(alike, name) for alike in group]) for name in ("times_ns", "seqs")
        )
        count = len(group[0].leaves)
        for number in range(max(1, count)):
            found = fields | (_leaf_fields(pa, group, number) if count else {})
            columns = [found.get(field.name, pa.nulls(len(seqs), field.type)) for field in schema]
            parts.append(pa.record_batch(columns, schema=schema))
            keys.append((np.full(len(seqs), number), seqs, times))
    order = np.lexsort([np.concatenate(key) for key in zip(*keys, strict=True)])
    return pa.Table.from_batches(parts).take(order)


def _fields(pa: Any, group: list[AlikeMessages], name: str) -> dict[str, Any]:
    # What all rows of messages of one tap and layout have.
    def each(field: str) -> Array:
        return np.concatenate([getattr(alike, field) for alike in group])

    tap, steps = group[0].tap, each("steps")
    constant = {"name": name, "source_line": tap.consumer.source_line}
    if tap.described is not None:
        constant["kind"] = tap.described.kind
    return {
        "time": pa.array(each("times_ns")).cast(pa.timestamp("ns", "UTC")),
        "process": pa.array([process_text(alike.writer) for alike in group for _ in range(alike.messages)]),
        "device": pa.array([alike.device for alike in group for _ in range(alike.messages)]),
        "seq": pa.array(each("seqs")),
        "step": pa.array(steps, mask=steps == NO_STEP),
        "run_id": pa.array(each("launches")),
        "folded": pa.array(each("folded")),
        **{field: pa.repeat(text, len(steps)) for field, text in constant.items()},
    }


def _leaf_fields(pa: Any, group: list[AlikeMessages], number: int) -> dict[str, Any]:
    # What the rows of one array of these messages have besides.
    leaves = [alike.leaves[number] for alike in group]
    first, places = leaves[0], [leaf.place for leaf in leaves]
    array = np.concatenate([plain_array(leaf.array) for leaf in leaves])
    count, shape, kind = len(array), array.shape[1:], array.dtype.kind
    flat = array.reshape(count, math.prod(shape))
    if kind == "c":  # real and imaginary parts alternate
        flat = flat.astype(np.complex128).view(np.float64)
    elements = "floats" if kind in "fc" else "unsigned" if array.dtype == np.uint64 else "integers"
    found = {
        "leaf": pa.repeat(first.name, count),
        "dtype": pa.repeat(first.array.dtype.name, count),
        "shape": _lists(pa, np.tile(np.array(shape, np.int64), (count, 1))),
        elements: _lists(
            pa, flat.astype({"floats": np.float64, "unsigned": np.uint64}.get(elements, np.int64))
        ),
    }
    if not shape and kind != "c":
        found["value"] = pa.array(array.astype(np.float64))
    if first.whole_shape is not None:
        found["whole_shape"] = _lists(pa, np.tile(np.array(first.whole_shape, np.int64), (count, 1)))
    if first.place is not None:
        starts = [[part.start for part in place or ()] for place in places]
        repeated = np.repeat(np.array(starts, np.int64), [alike.messages for alike in group], axis=0)
        found["start"] = _lists(pa, repeated)
    return found


def _lists(pa: Any, rows: Array) -> Any:
    # Through numpy: a Python object per element would need ten times the memory.
    if rows.size > np.iinfo(np.int32).max:
        raise ConvertError("an array has more elements than a Parquet list can hold, 2**31 - 1")
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(rows.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))
