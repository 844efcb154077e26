"""Writers of metrics to CSV files and to files of JSON lines."""

from __future__ import annotations

import contextlib
import csv as csv_format
import errno
import io
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np

from hostcallback.receiver.files import refuse_unwritable
from hostcallback.receiver.log import logger
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.sinks.metric_writers.reduction import NO_STEP, MetricRecord, UnsupportedMetric

PathLike = str | os.PathLike[str]

MAX_TORN = 1 << 16
"""Bytes of a row that lacks an end, and is removed."""


class _FileWriter:
    # A file that the first receiver makes, and that later receivers with the same writer append to.
    #
    # `advice` says how to keep the content of a file; `has_devices`, whether each record has the name of its device.

    takes_records: ClassVar[bool] = True
    _is_table: ClassVar[bool] = False  # of cells, the last of which may be cut short
    has_devices = False

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
        self.path, self._mode = Path(file), mode
        self.advice = f"{what}(..., mode='a') appends"
        self._lines = 0
        self._file: Any = None

    def __repr__(self) -> str:
        return f"{self.name}"

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{type(self).__name__.removesuffix('Writer').lower()} {self.path}"

    def open(self) -> None:
        """Opens the file, and makes its folder if there is none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._mode == "w" and self.path.exists() and self.path.stat().st_size:
            logger.warning("%s had content and is replaced; %s", self.path, self.advice)
        if self._mode == "a":
            self._mend()
        self._file = self.path.open(self._mode, encoding="utf-8", newline="")
        # A later receiver with the same writer goes on with the file, and must not empty it.
        self._mode = "a"

    def _mend(self) -> None:
        # A file that ends within a line, as after a kill or a loss of power, must not get the next row on that line.
        if not self.path.is_file():  # a pipe has no end yet
            return
        with self.path.open("rb") as file:
            size, end = file.seek(0, os.SEEK_END), _end_of_text(file)
            file.seek(max(0, end - 1))
            if size == end and file.read() in (b"", b"\n"):
                return
        with self.path.open("rb+") as file:
            file.truncate(end)  # a loss of power may leave zeros
            start = self._last_row(file)
            file.seek(start)
            last = file.read()
            if not last or last.endswith(b"\n"):
                logger.warning("%s ended with %d zero byte(s), which are removed", self.path, size - end)
            elif len(last) <= MAX_TORN and (end < size or not self._is_whole(last)):
                file.truncate(start)
                logger.warning("%s ended within a line, which is removed: %.200r", self.path, last)
            else:
                file.write(b"\n")
                if self._is_table and not last.endswith(b"\r"):
                    logger.warning(
                        "%s had no newline after its last line, whose last value may be cut short: %.200r",
                        self.path, last,
                    )  # fmt: skip

    def _last_row(self, file: IO[bytes]) -> int:
        # Where it begins.
        file.seek(0)
        start = end = 0
        for line in file:
            start, end = end, end + len(line)
        return start

    def _is_whole(self, row: bytes) -> bool:
        # Whether a row without a newline has all of its values.
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Flushes the file's buffer, and returns from where a later writer of the file can go on, as plain data."""
        self._opened().flush()
        return {"lines": self._lines}

    def append(self) -> None:
        """Makes `open` keep what the file has."""
        self._mode = "a"
        if self.path.is_file():
            self._mend()
            self._lines = sys.maxsize
            self._cut()  # counts them

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, instead of `open`. What was written since then is taken out of the file."""
        self._mode = "a"
        self._mend()
        self._lines = state["lines"]
        self._cut()
        self.open()

    def _cut(self) -> None:
        if not self.path.is_file():
            self._lines = 0
            return
        with self.path.open("rb+") as file:
            self._skip_header(file)
            self._lines = sum(1 for _ in zip(range(self._lines), file, strict=False))
            os.truncate(file.fileno(), file.tell())

    def _skip_header(self, file: Any) -> None:
        pass

    def flush(self) -> None:
        """Flushes the file's buffer to the operating system."""
        if self._file is not None:
            self._file.flush()

    def settle(self) -> bool:
        """Flushes the file's buffer; see `RecordWriter`."""
        self.flush()
        return False

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

    def _is_whole(self, row: bytes) -> bool:
        try:
            return isinstance(json.loads(row), dict)
        except ValueError:
            return False

    def write(self, record: MetricRecord) -> None:
        """Writes a record as one line."""
        line: dict[str, Any] = {**_plain(record.scalars), **record.texts}
        for name, values in record.histograms.items():
            line[name] = _histogram(values, record.bins[name])
        if line:
            first = {"step": _step(record), "device": record.device}
            if not self.has_devices:
                del first["device"]
            self._opened().write(json.dumps(first | line, ensure_ascii=False) + "\n")
            self._lines += 1
        if record.images:
            raise UnsupportedMetric("no images")


MAX_ROWS = 1024
"""Rows of a CSV file that wait for further metrics of their steps."""

WAIT_SEC = 2.0
"""Seconds for which a row waits, where further ones come."""


_RowKey = tuple[int, str, int]


class _Row(NamedTuple):
    # A row, and when its first metric came.
    since: float
    values: dict[str, Any]


class CsvWriter(_FileWriter):
    """See `csv`."""

    _is_table = True

    def __init__(self, file: PathLike, mode: str) -> None:
        """As of the base class."""
        super().__init__(file, mode)
        self._columns: list[str] = []
        # By step and device, those that are not written yet, in the order of their first metrics. Those without a step
        # have numbers.
        self._rows: dict[_RowKey, _Row] = {}
        self._without_step = 0

    def open(self) -> None:
        """Opens the file; to append, reads its header."""
        append = self._mode == "a"
        super().open()
        if append:
            self._columns = self._header()

    def _header(self) -> list[str]:
        with self.path.open(encoding="utf-8", newline="") as file:
            return next(csv_format.reader(file), [])

    def _last_row(self, file: IO[bytes]) -> int:
        start = end = 0

        def lines() -> Iterator[str]:
            nonlocal end
            for line in file:
                end += len(line)
                yield line.decode("utf-8", "replace").replace("\0", " ")

        file.seek(0)
        reader, before = csv_format.reader(lines()), 0  # a text may have newlines
        try:
            while next(reader, None) is not None:
                start, before = before, end
        except csv_format.Error:  # an odd quote has taken in what followed
            return super()._last_row(file)
        return start

    def _is_whole(self, row: bytes) -> bool:
        try:
            text = row.decode("utf-8")
        except UnicodeDecodeError:
            return False
        # An open quote takes in what follows.
        with io.StringIO(f"{text.replace(chr(0), ' ')}\n,", newline="") as lines:
            try:
                cells, *after = csv_format.reader(lines)
            except csv_format.Error:
                return False
        return "\0" not in text and bool(after) and len(cells) >= len(self._header())

    def state(self) -> dict[str, Any]:
        """As of the base class, with the rows that are not written yet."""
        return super().state() | {"rows": [[*key, row.values] for key, row in self._rows.items()]}

    def resume(self, state: dict[str, Any]) -> None:
        """As of the base class."""
        now = time.monotonic()
        self._rows = {
            (step, device, number): _Row(now, values) for step, device, number, values in state["rows"]
        }
        self._without_step = max((number for *_, number in self._rows), default=0)
        super().resume(state)

    def _skip_header(self, file: Any) -> None:
        # A name in it may have several lines.
        lines = (line.decode() for line in iter(file.readline, b""))
        next(csv_format.reader(lines), None)

    def write(self, record: MetricRecord) -> None:
        """Adds to the row of a step, which waits a while for metrics of other taps."""
        values: dict[str, Any] = {_inert(name): value for name, value in record.scalars.items()}
        values |= {_inert(name): _inert(text) for name, text in record.texts.items()}
        if values:
            key, now = self._key(record), time.monotonic()
            row = self._rows.get(key)
            if len(self._rows) >= MAX_ROWS or (row is not None and row.values.keys() & values.keys()):
                self._write_rows(now)
                row = None
            elif self._rows and next(iter(self._rows.values())).since < now - WAIT_SEC:
                self._write_rows(now - WAIT_SEC)
                row = self._rows.get(key)
            if row is None:
                of_device = {"device": _inert(record.device)} if self.has_devices else {}
                row = self._rows[key] = _Row(now, {"step": _step(record), **of_device})
            row.values.update(values)
        refused = [kind for kind in ("histograms", "images") if getattr(record, kind)]
        if refused:
            raise UnsupportedMetric(f"no {' and no '.join(refused)}")

    def _key(self, record: MetricRecord) -> _RowKey:
        if record.step != NO_STEP:
            return record.step, record.device, 0
        self._without_step += 1
        return record.step, record.device, self._without_step

    def flush(self) -> None:
        """Writes all rows."""
        self._write_rows(math.inf)
        super().flush()

    def settle(self) -> bool:
        """Writes the rows that have waited long enough."""
        self._write_rows(time.monotonic() - WAIT_SEC)
        super().flush()
        return bool(self._rows)

    def _write_rows(self, until: float) -> None:
        # Those that have waited since a time, in the order of their steps.
        ready = sorted(step for step, row in self._rows.items() if row.since <= until)
        rows = [self._rows.pop(step).values for step in ready]
        new = dict.fromkeys(name for row in rows for name in row if name not in self._columns)
        failure = None
        if new:
            try:
                self._extend([*new])
            except OSError as error:  # the rows are written all the same, with the columns that the file has
                failure = error
        if rows and self._columns and self._file is not None:
            cells = ([_cell(row.get(name)) for name in self._columns] for row in rows)
            csv_format.writer(self._file).writerows(cells)
            self._lines += len(rows)
        if failure is not None:
            raise failure

    def _extend(self, new: list[str]) -> None:
        # A name that comes up later is a column more, so the rows so far are written again, in a new file.
        self._opened()
        self.close()
        columns = [*self._columns, *new]
        written = self.path.with_name(self.path.name + ".new")
        try:
            with (
                self.path.open(encoding="utf-8", newline="") as source,
                written.open("w", encoding="utf-8", newline="") as target,
            ):
                self._permit(written)
                out, rows = csv_format.writer(target), csv_format.reader(source)
                next(rows, None)
                out.writerow(columns)
                out.writerows([*row, *[""] * len(new)] for row in rows)
            # In one step, so that a crash leaves either the old file or the new one.
            written.replace(self.path)
            self._columns = columns
        except OSError:
            with contextlib.suppress(OSError):
                written.unlink()  # on a full disk it would take the room of later rows
            raise
        finally:  # after a failure too: later rows are written, and the next one tries again to add the columns
            self._file = self.path.open("a", encoding="utf-8", newline="")

    def _permit(self, written: Path) -> None:
        # Those who may read the file so far, and no others, may read the one in its place.
        found = self.path.stat()
        written.chmod(stat.S_IMODE(found.st_mode))
        with contextlib.suppress(OSError):
            os.chown(written, found.st_uid, found.st_gid)


def _end_of_text(file: IO[bytes]) -> int:
    # The number of bytes without zeros at the end.
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - MAX_TORN)
        file.seek(start)
        text = file.read(end - start).rstrip(b"\0")
        end = start + len(text)
        if text:
            break
    return end


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
        mode: "w" for a new file; "a" to append to one with the same columns or fewer. If its last line has no newline,
            as after a kill or a loss of power, a new line is begun; a last row that lacks cells is removed. A warning
            says so.

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
        mode: "w" for a new file, "a" to append. A last line that is no whole object, as after a kill or a loss of
            power, is removed. A warning says so.

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


def _step(record: MetricRecord) -> int | None:
    return None if record.step == NO_STEP else record.step


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _histogram(values: Any, bins: int) -> dict[str, list[float]]:
    finite = values if values.dtype.kind in "iu" else values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=bins)
    return {"counts": counts.tolist(), "edges": edges.tolist()}
