"""Converts to numpy's .npz: the arrays of each tap stacked, with columns of steps, times, devices and processes."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.taplog.convert.output import plain_array
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, LoggedTap
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.render.json import plain_value, process_text
from hostcallback.receiver.taplog.render.text import Leaf, LoggedLeaves
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.frame_layout import Array
from hostcallback.receiver.wire.truncation import TruncatedArray

BUFFER_BYTES = 64 << 20
"""Bytes that are collected in memory before they are written to the columns' files."""


class _Kind(NamedTuple):
    # The common properties of a group's messages.
    name: str
    source_line: str
    kind: str | None
    kwargs: str
    transforms: str
    leaves: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...] | None, bool], ...]


class _Column:
    # One array of the result. Its rows are in a file until `finish` copies them into the archive.

    def __init__(self, key: str, dtype: np.dtype[Any], shape: tuple[int, ...], path: Path) -> None:
        self.key, self.dtype, self.shape, self.path = key, dtype, shape, path
        self.rows = 0
        self.gathered: list[bytes] = []

    def add(self, row: Any) -> int:
        data = np.ascontiguousarray(row, self.dtype).tobytes()
        self.gathered.append(data)
        self.rows += 1
        return len(data) + 64

    def flush(self) -> None:
        with self.path.open("ab") as file:
            file.writelines(self.gathered)
        self.gathered.clear()


class _Group:
    # Messages of one tap whose arrays have equal dtypes and shapes.

    def __init__(self, name: str, columns: list[_Column], about: dict[str, Any]) -> None:
        self.name, self.columns, self.about = name, columns, about


class NpzConversion:
    """Writes an .npz file.

    Memory is limited to `BUFFER_BYTES` and a few hundred bytes per tap; everything else is in files of a scratch
    folder, which in the end are as large as the result.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        """Args:
        path: of the result, written by `finish`.
        scratch: an empty folder.
        """
        self._path = path
        self._scratch = scratch
        self._leaves = LoggedLeaves()
        self._known: dict[tuple[LoggedTap, Any], _Group] = {}
        self._groups: dict[_Kind, _Group] = {}
        self._keys: set[str] = {"taps", "devices", "processes"}
        self._devices: dict[str, int] = {}
        self._processes: dict[str, int] = {}
        self._columns: list[_Column] = []
        self._gathered = 0

    def message(self, logged: LoggedMessage) -> None:
        """Adds a row to the stacks of its tap."""
        leaves = self._leaves.of(logged)
        message = logged.message
        group = self._group(logged, leaves)
        rows: list[Any] = [
            NO_STEP if logged.step is None else logged.step,
            message.time_ns,
            message.seq,
            self._devices.setdefault(message.device, len(self._devices)),
            self._processes.setdefault(process_text(logged.writer), len(self._processes)),
            logged.folded,
        ]
        for leaf in leaves:
            rows.append(plain_array(leaf.array))
            if leaf.place is not None:
                rows.append(
                    np.array([[part.start, part.stop] for part in leaf.place], np.int64).reshape(-1, 2)
                )
        for column, row in zip(group.columns, rows, strict=True):
            self._gathered += column.add(row)
        if self._gathered > BUFFER_BYTES:
            self._flush()

    def lost(self, run: LostRun) -> None:
        """Does nothing: rows are messages only."""

    def finish(self) -> None:
        """Writes the file."""
        self._flush()
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for column in self._columns:
                header = {
                    "descr": np.lib.format.dtype_to_descr(column.dtype),
                    "fortran_order": False,
                    "shape": (column.rows, *column.shape),
                }
                with archive.open(_member(column.key), "w", force_zip64=True) as entry:
                    np.lib.format.write_array_header_2_0(entry, header)
                    with column.path.open("rb") as file:
                        shutil.copyfileobj(file, entry, 1 << 20)
                column.path.unlink()
            about = {group.name: group.about for group in self._groups.values()}
            texts = {
                "taps": np.array(json.dumps(about)),
                "devices": np.array(list(self._devices), np.str_),
                "processes": np.array(list(self._processes), np.str_),
            }
            for key, array in texts.items():
                with archive.open(_member(key), "w") as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    def _flush(self) -> None:
        for column in self._columns:
            if column.gathered:
                column.flush()
        self._gathered = 0

    def _group(self, logged: LoggedMessage, leaves: list[Leaf]) -> _Group:
        shapes = tuple((leaf.array.dtype, leaf.array.shape, _whole(leaf.array)) for leaf in leaves)
        group = self._known.get((logged.tap, shapes))
        if group is None:
            kind = _kind(logged, leaves)
            group = self._groups.get(kind)
            if group is None:
                group = self._groups[kind] = self._new_group(kind, logged, leaves)
            self._known[logged.tap, shapes] = group
        return group

    def _new_group(self, kind: _Kind, logged: LoggedMessage, leaves: list[Leaf]) -> _Group:
        columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            ":step": (np.dtype(np.int64), ()),
            ":time_ns": (np.dtype(np.int64), ()),
            ":seq": (np.dtype(np.uint64), ()),
            ":device": (np.dtype(np.int32), ()),
            ":process": (np.dtype(np.int32), ()),
            ":folded": (np.dtype(np.uint64), ()),
        }
        for leaf in leaves:
            array = plain_array(leaf.array)
            suffix = f"/{printable(leaf.name)}" if leaf.name else ""
            columns[suffix] = array.dtype, array.shape
            if leaf.place is not None:
                columns[f"{suffix}:index"] = np.dtype(np.int64), (len(leaf.place), 2)
        first = printable(kind.name)  # zipfile cuts the name of a member at a NUL
        number, name = 1, first
        while self._keys.intersection(name + suffix for suffix in columns):
            number += 1
            name = f"{first}#{number}"
        self._keys.update(name + suffix for suffix in columns)
        made = [
            _Column(name + suffix, dtype, shape, self._scratch / f"{len(self._columns) + index}")
            for index, (suffix, (dtype, shape)) in enumerate(columns.items())
        ]
        self._columns += made
        return _Group(name, made, _about(kind, logged, leaves))


def _kind(logged: LoggedMessage, leaves: list[Leaf]) -> _Kind:
    consumer, described = logged.message.consumer, logged.tap.described
    return _Kind(
        consumer.name,
        consumer.source_line,
        None if described is None else described.kind,
        repr(dict(consumer.kwargs)),
        repr(consumer.transforms),
        tuple(
            (leaf.name, leaf.array.dtype.name, leaf.array.shape, _whole(leaf.array), leaf.place is not None)
            for leaf in leaves
        ),
    )


def _whole(array: Array) -> tuple[int, ...] | None:
    return array.whole_shape if isinstance(array, TruncatedArray) else None


def _about(kind: _Kind, logged: LoggedMessage, leaves: list[Leaf]) -> dict[str, Any]:
    consumer = logged.message.consumer
    return {
        "name": kind.name,
        "source_line": kind.source_line,
        "kind": kind.kind,
        "kwargs": plain_value(dict(consumer.kwargs)),
        "transforms": [[name, plain_value(params)] for name, params in consumer.transforms],
        "leaves": {
            leaf.name: {"dtype": leaf.array.dtype.name, "shape": list(leaf.array.shape)}
            | ({} if (whole := _whole(leaf.array)) is None else {"whole_shape": list(whole)})
            for leaf in leaves
        },
    }


def _member(key: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{key}.npy")  # without a time, so that the same log gives the same file
