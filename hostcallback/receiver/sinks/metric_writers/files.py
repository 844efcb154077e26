"""Writers of metrics to CSV files and to files of JSON lines."""

from __future__ import annotations

import csv as csv_format
import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hostcallback.receiver.files import refuse_unwritable
from hostcallback.receiver.log import logger
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord, UnsupportedMetric

PathLike = str | os.PathLike[str]


class _FileWriter:
    # A file that the first receiver makes, and that later receivers with the same writer append to.

    takes_records: ClassVar[bool] = True

    def __init__(self, file: PathLike, mode: str) -> None:
        what = f"hcb.{type(self).__name__.removesuffix('Writer').lower()}"
        if not isinstance(file, str | os.PathLike):
            raise TypeError(
                f"{what}: file is {type(file).__name__} {file!r:.80}, expected the path of a file, as in "
                f"{what}('metrics')"
            )
        if Path(file).is_dir():
            raise IsADirectoryError(
                errno.EISDIR,
                f"{what} writes a file, and this is a folder: add a name, such as metrics.csv",
                str(file),
            )
        refuse_unwritable(Path(file), what)
        if mode not in ("w", "a"):
            raise ValueError(f"mode is {mode!r}, expected 'w' (a new file) or 'a' (append)")
        self._path, self._mode, self._called = Path(file), mode, what
        self._file: Any = None

    def __repr__(self) -> str:
        return f"{self.name}"

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{type(self).__name__.removesuffix('Writer').lower()} {self._path}"

    def open(self) -> None:
        """Opens the file, and makes its folder if there is none."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._mode == "w" and self._path.exists() and self._path.stat().st_size:
            logger.warning(
                "%s had content and is replaced; %s(..., mode='a') appends", self._path, self._called
            )
        self._file = self._path.open(self._mode, encoding="utf-8", newline="")
        # A later receiver with the same writer goes on with the file, and must not empty it.
        self._mode = "a"

    def flush(self) -> None:
        """Flushes the file's buffer to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> Any:
        if self._file is None:
            raise ValueError(f"{self.name} is not open: pass it in writers= of outfeed_receiver")
        return self._file


class JsonlWriter(_FileWriter):
    """See `jsonl`."""

    def write(self, record: MetricRecord) -> None:
        """Writes a record as one line."""
        line: dict[str, Any] = {"step": record.step, **_plain(record.scalars), **record.texts}
        for name, values in record.histograms.items():
            line[name] = _histogram(values, record.bins[name])
        if len(line) > 1:
            self._opened().write(json.dumps(line, ensure_ascii=False) + "\n")
        if record.images:
            raise UnsupportedMetric("no images")


MAX_ROWS = 1024
"""Rows of a CSV file that wait for further metrics of their steps."""

WAIT_SEC = 2.0
"""Seconds for which a row waits, where further ones come."""


class _Row(NamedTuple):
    # A row, and when its first metric came.
    since: float
    values: dict[str, Any]


class CsvWriter(_FileWriter):
    """See `csv`."""

    def __init__(self, file: PathLike, mode: str) -> None:
        """As of the base class."""
        super().__init__(file, mode)
        self._columns: list[str] = []
        self._rows: dict[
            int, _Row
        ] = {}  # by step, those that are not written yet, in the order of their first metrics

    def open(self) -> None:
        """Opens the file; to append, reads its header."""
        if self._mode == "a" and self._path.exists():
            with self._path.open(encoding="utf-8", newline="") as file:
                self._columns = next(csv_format.reader(file), [])
        super().open()

    def write(self, record: MetricRecord) -> None:
        """Adds to the row of a step, which waits a while for metrics of other taps."""
        values: dict[str, Any] = {_inert(name): value for name, value in record.scalars.items()}
        values |= {_inert(name): _inert(text) for name, text in record.texts.items()}
        if values:
            row, now = self._rows.get(record.step), time.monotonic()
            if len(self._rows) >= MAX_ROWS or (row is not None and row.values.keys() & values.keys()):
                self._write_rows(now)
                row = None
            elif self._rows and next(iter(self._rows.values())).since < now - WAIT_SEC:
                self._write_rows(now - WAIT_SEC)
                row = self._rows.get(record.step)
            if row is None:
                row = self._rows[record.step] = _Row(now, {"step": record.step})
            row.values.update(values)
        refused = [kind for kind in ("histograms", "images") if getattr(record, kind)]
        if refused:
            raise UnsupportedMetric(f"no {' and no '.join(refused)}")

    def flush(self) -> None:
        """Writes all rows."""
        self._write_rows(math.inf)
        super().flush()

    def _write_rows(self, until: float) -> None:
        # Those that have waited since a time, in the order of their steps.
        ready = sorted(step for step, row in self._rows.items() if row.since <= until)
        rows = [self._rows.pop(step).values for step in ready]
        new = dict.fromkeys(name for row in rows for name in row if name not in self._columns)
        if new:
            self._extend([*new])
        if rows:
            cells = ([_cell(row.get(name)) for name in self._columns] for row in rows)
            csv_format.writer(self._opened()).writerows(cells)

    def _extend(self, new: list[str]) -> None:
        # A name that comes up later is a column more, so the rows so far are written again, in a new file.
        self._opened().close()
        columns = [*self._columns, *new]
        written = self._path.with_name(self._path.name + ".new")
        try:
            with (
                self._path.open(encoding="utf-8", newline="") as source,
                written.open("w", encoding="utf-8", newline="") as target,
            ):
                out, rows = csv_format.writer(target), csv_format.reader(source)
                next(rows, None)
                out.writerow(columns)
                out.writerows([*row, *[""] * len(new)] for row in rows)
            # In one step, so that a crash leaves either the old file or the new one.
            written.replace(self._path)
            self._columns = columns
        finally:  # after a failure too: later rows are written, and the next one tries again to add the columns
            self._file = self._path.open("a", encoding="utf-8", newline="")


def _inert(text: str) -> str:
    # Spreadsheets run a cell that begins so as a formula, and names and texts may come from anybody's log.
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


@hide_frames
def csv(file: PathLike, *, mode: str = "w") -> CsvWriter:
    """Returns a writer of metrics to a CSV file: a row per step, and a column `step` and one per metric.

    Metrics of one step share a row if they arrive within two seconds. Rows wait that long, a thousand at most, and are
    then written in the order of their steps. A metric that comes up later is one more column, empty in the rows before.
    Histograms and images are left out, and counted. Names and texts that a spreadsheet would run as a formula (`=`,
    `+`, `-` or `@` first) have a `'` before them.

    Args:
        file: path of the file, in a folder that is made if it does not exist.
        mode: "w" for a new file; "a" to append to one with the same columns or fewer.

    Raises:
        TypeError: `file` is not a path.
        ValueError: `mode` is something else.
        OSError: the file cannot be made there: it is a folder, or its folder cannot be written.

    Example:
        with hcb.outfeed_receiver(writers=[hcb.csv("metrics.csv")]):
            train()
    """
    return CsvWriter(file, mode)


@hide_frames
def jsonl(file: PathLike, *, mode: str = "w") -> JsonlWriter:
    """Returns a writer of metrics to a file of JSON lines: `{"step": 3, "loss": 0.5}`.

    JSON has no NaN and no infinite numbers: they become the texts "NaN", "Infinity" and "-Infinity", as in protobuf's
    JSON. Python's `float` and `pandas.read_json(file, lines=True)` read them back as numbers. A histogram becomes
    `{"counts": [...], "edges": [...]}`. Images are left out, and counted.

    Args:
        file: path of the file, in a folder that is made if it does not exist.
        mode: "w" for a new file, "a" to append.

    Raises:
        TypeError: `file` is not a path.
        ValueError: `mode` is something else.
        OSError: the file cannot be made there: it is a folder, or its folder cannot be written.

    Example:
        with hcb.outfeed_receiver(writers=[hcb.jsonl("metrics.jsonl")]):
            train()
    """
    return JsonlWriter(file, mode)


def _plain(scalars: dict[str, float]) -> dict[str, float | str]:
    return {
        name: value if math.isfinite(value) else _NAMES[str(float(value))] for name, value in scalars.items()
    }


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _histogram(values: Any, bins: int) -> dict[str, list[float]]:
    finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=bins)
    return {"counts": counts.tolist(), "edges": edges.tolist()}
