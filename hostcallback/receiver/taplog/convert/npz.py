"""Converts to numpy's .npz: the arrays of each tap stacked, with arrays of steps, times, devices and processes."""

from __future__ import annotations

import itertools
import json
import shutil
import zipfile
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from hostcallback.receiver.taplog.columns.column_batches import AlikeMessages
from hostcallback.receiver.taplog.reading.logged_message import LoggedTap
from hostcallback.receiver.taplog.render import plain_array, plain_value, process_text
from hostcallback.receiver.text import printable
from hostcallback.receiver.wire.array_types import Array

BUFFER_BYTES = 64 << 20
"""Bytes that are collected in memory before they are written to the arrays' files."""


class _Rows:
    # One array of the result. Its rows are in a file of their own until the archive is written.

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gathered: list[Array] = []
        self._count = 0

    def add(self, rows: Array) -> int:
        self._gathered.append(rows)
        self._dtype, self._shape = rows.dtype, rows.shape[1:]
        self._count += len(rows)
        return rows.nbytes + 64

    def flush(self) -> None:
        if self._gathered:
            with self._path.open("ab") as file:
                file.writelines(rows.tobytes() for rows in self._gathered)
            self._gathered.clear()

    def move_to(self, entry: IO[bytes]) -> None:
        """Writes the array as a .npy file."""
        self.flush()
        descr, shape = np.lib.format.dtype_to_descr(self._dtype), (self._count, *self._shape)
        np.lib.format.write_array_header_2_0(entry, {"descr": descr, "fortran_order": False, "shape": shape})
        with self._path.open("rb") as file:
            shutil.copyfileobj(file, entry, 1 << 20)
        self._path.unlink()


def write_npz(
    messages: Iterable[AlikeMessages], path: Path, scratch: Path, name_of: Callable[[LoggedTap], str]
) -> None:
    """Writes an .npz file. `name_of` returns what a tap is called in it.

    Memory is limited to `BUFFER_BYTES` and a few hundred bytes per tap; everything else is in files of `scratch`, an
    empty folder, which in the end are as large as the result.
    """
    taps: dict[str, Any] = {}
    arrays: dict[str, _Rows] = {}
    stacks: dict[str, dict[str, _Rows]] = {}  # of messages that have all in common that `taps` describes
    known: dict[Any, dict[str, _Rows]] = {}
    numbers: dict[str, dict[str, int]] = {"devices": {}, "processes": {}}
    gathered = 0
    for alike in messages:
        fields = _fields(alike, **numbers)
        stack = known.get(alike.layout)
        if stack is None:
            tap = name_of(alike.tap)
            about = _about(alike, tap)
            stack = known[alike.layout] = stacks.setdefault(json.dumps([about, [*fields]]), {})
            if not stack:
                reserved = {"taps", *numbers, *arrays}
                name = _free(printable(tap), fields, reserved)
                taps[name] = about
                stack |= {field: _Rows(scratch / f"{len(arrays) + n}") for n, field in enumerate(fields)}
                arrays |= {name + field: rows for field, rows in stack.items()}
        gathered += sum(stack[field].add(rows) for field, rows in fields.items())
        if gathered > BUFFER_BYTES:
            for rows in arrays.values():
                rows.flush()
            gathered = 0
    texts = {"taps": json.dumps(taps), **{key: [*found] for key, found in numbers.items()}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, rows in arrays.items():
            with _entry(archive, key) as entry:
                rows.move_to(entry)
        for key, text in texts.items():
            with _entry(archive, key) as entry:
                np.lib.format.write_array(entry, np.array(text, np.str_), allow_pickle=False)


def _entry(archive: zipfile.ZipFile, key: str) -> IO[bytes]:
    # Without a time, so that the same log gives the same file.
    return archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True)


def _fields(alike: AlikeMessages, devices: dict[str, int], processes: dict[str, int]) -> dict[str, Array]:
    # The rows of messages, by what follows the tap's name in the key.
    process = process_text(alike.writer)
    fields = {
        ":step": alike.steps,
        ":time_ns": alike.times_ns,
        ":seq": alike.seqs,
        ":device": np.full(alike.messages, devices.setdefault(alike.device, len(devices)), np.int32),
        ":process": np.full(alike.messages, processes.setdefault(process, len(processes)), np.int32),
        ":folded": alike.folded,
    }
    for leaf in alike.leaves:
        name = _free(f"/{printable(leaf.name)}" if leaf.name else "", [""], fields)
        fields[name] = plain_array(leaf.array)
        if leaf.place is not None:
            index = np.array([[part.start, part.stop] for part in leaf.place], np.int64).reshape(-1, 2)
            fields[f"{name}:index"] = np.broadcast_to(index, (alike.messages, *index.shape))
    return fields


def _free(name: str, endings: Iterable[str], taken: Container[str]) -> str:
    # The name, or with the first number with which none of its endings makes a taken one: `a`, `a#2`, `a#3`.
    names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    return next(name for name in names if not any(name + ending in taken for ending in endings))


def _about(alike: AlikeMessages, name: str) -> dict[str, Any]:
    consumer, described = alike.tap.consumer, alike.tap.described
    return {
        "name": name,
        "source_line": consumer.source_line,
        "kind": None if described is None else described.kind,
        "kwargs": plain_value(dict(consumer.kwargs)),
        "transforms": [[name, plain_value(params)] for name, params in consumer.transforms],
        "leaves": {
            leaf.name: {"dtype": leaf.array.dtype.name, "shape": list(leaf.array.shape[1:])}
            | ({} if (whole := leaf.whole_shape) is None else {"whole_shape": list(whole)})
            for leaf in alike.leaves
        },
    }
