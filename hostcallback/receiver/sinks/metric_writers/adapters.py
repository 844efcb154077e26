"""Makes writers of records out of the objects of other libraries, and the writer of TensorBoard's event files."""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.files import refuse_unwritable
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.sinks.metric_writers.reduction import MetricRecord, RecordWriter, UnsupportedMetric
from hostcallback.receiver.sinks.tap import takes_keyword

KNOWN = "write_scalars, add_scalar, log_metrics, track, log_scalar or log"


def as_record_writer(writer: Any) -> RecordWriter:
    """Returns the writer of records for an object of the user.

    Raises:
        TypeError: it has none of the methods that writers have.
    """
    # On the class, because a mock, or a module with a catch-all, has every attribute.
    if getattr(type(writer), "takes_records", False) is True:
        own: RecordWriter = writer
        return own
    if isinstance(writer, type):
        raise TypeError(
            f"writers has the class {writer.__qualname__}, expected an object: {writer.__qualname__}(...)"
        )
    if not isinstance(writer, logging.Logger):  # its `log` takes a level and a text
        for method, adapter in _ADAPTERS:
            if callable(getattr(writer, method, None)):
                return adapter(writer)
    raise TypeError(
        f"writers has {type(writer).__name__} {str(writer)[:80]!r}, expected hcb.tensorboard(folder), hcb.csv(file), "
        f"hcb.jsonl(file), or an object with one of the methods {KNOWN}"
    )


class _Adapter:
    # Writes to an object of the user, which stays open.

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @property
    def name(self) -> str:
        kind = type(self._writer)
        if inspect.ismodule(self._writer):
            return str(self._writer.__name__)
        return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"

    def open(self) -> None:
        pass

    def write(self, record: MetricRecord) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        flush = getattr(self._writer, "flush", None)
        if callable(flush):
            flush()

    def close(self) -> None:
        pass

    def refuse(self, kinds: list[str]) -> None:
        if kinds:
            raise UnsupportedMetric(f"no {' and no '.join(kinds)}")


class ScalarWriter(_Adapter):
    """For `write_scalars(step, scalars)` and its siblings, as of clu's MetricWriter."""

    def write(self, record: MetricRecord) -> None:
        """Writes a record."""
        refused: list[str] = []
        for method, values in (
            ("write_scalars", record.scalars),
            ("write_images", record.images),
            ("write_texts", record.texts),
        ):
            if values:
                self._all(method, record.step, values, refused)
        if record.histograms:
            bins = {name: record.bins[name] for name in record.histograms}
            self._all("write_histograms", record.step, record.histograms, refused, bins)
        self.refuse(refused)

    def _all(self, method: str, step: int, values: dict[str, Any], refused: list[str], *more: Any) -> None:
        write = getattr(self._writer, method, None)
        if callable(write):
            # clu's images have a leading axis: [N, H, W, C].
            write(
                step, {k: v[None] for k, v in values.items()} if method == "write_images" else values, *more
            )
        else:
            refused.append(method.removeprefix("write_"))


class SummaryWriter(_Adapter):
    """For `add_scalar(tag, value, step)` and its siblings, as of the SummaryWriter of tensorboardX and PyTorch."""

    def __init__(self, writer: Any) -> None:
        """Looks at which of the methods take the time."""
        super().__init__(writer)
        self._has_time = {
            method: takes_keyword(found, "walltime")
            for method in ("add_scalar", "add_histogram", "add_image", "add_text")
            if callable(found := getattr(writer, method, None))
        }

    def write(self, record: MetricRecord) -> None:
        """Writes a record, with the time of its emission where the writer takes one."""
        refused: list[str] = []
        for name, value in record.scalars.items():
            self._add("add_scalar", record, refused, name, value)
        for name, values in record.histograms.items():
            if self._has_time.get("add_histogram") is not None:
                finite = _finite(values)
                if finite.size:
                    self._add("add_histogram", record, refused, name, finite, bins=record.bins[name])
            else:
                refused.append("histograms")
        for name, pixels in record.images.items():
            self._add("add_image", record, refused, name, pixels, dataformats="HWC")
        for name, text in record.texts.items():
            self._add("add_text", record, refused, name, text)
        self.refuse(list(dict.fromkeys(refused)))

    def _add(
        self, method: str, record: MetricRecord, refused: list[str], name: str, value: Any, **options: Any
    ) -> None:
        if method not in self._has_time:
            refused.append(method.removeprefix("add_") + "s")
            return
        if self._has_time[method]:
            options["walltime"] = record.time_ns * 1e-9
        getattr(self._writer, method)(name, value, record.step, **options)


def _takes(method: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    # Lightning's `log_image(key, images, step)` does not take what mlflow's takes.
    try:
        inspect.signature(method).bind(*arguments, **options)
    except (TypeError, ValueError):
        return False
    return True


class MetricsLogger(_Adapter):
    """For `log_metrics(metrics, step=)`, as of mlflow and Lightning's loggers."""

    _run: dict[str, Any] | None = None

    def open(self) -> None:
        """Remembers mlflow's active run: mlflow has none on the writer's thread, and would start a new one."""
        active = getattr(self._writer, "active_run", None)
        if inspect.ismodule(self._writer) and callable(active):
            run = active()
            if run is None:
                raise ValueError(
                    f"writers has the module {self.name}, which has no active run: enter {self.name}.start_run() first"
                )
            self._run = {"run_id": run.info.run_id}

    def write(self, record: MetricRecord) -> None:
        """Writes a record. Images and texts need mlflow's `log_image` and `log_text`."""
        refused = ["histograms"] if record.histograms else []
        if record.scalars:
            self._writer.log_metrics(record.scalars, step=record.step, **(self._run or {}))
        image, text = (self._of_run(name) for name in ("log_image", "log_text"))
        for name, pixels in record.images.items():
            if image is None or not _takes(image, pixels, key=name, step=record.step):
                refused.append("images")
                break
            image(pixels, key=name, step=record.step)
        for name, line in record.texts.items():
            if text is None or not _takes(text, line, artifact_file=name):
                refused.append("texts")
                break
            text(line, artifact_file=f"{name}/{record.step}.txt")
        self.refuse(refused)

    def _of_run(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._writer, name, None)
        client = getattr(self._writer, "MlflowClient", None)
        if found is None or not self._run or client is None:
            return found
        return functools.partial(getattr(client(), name), self._run["run_id"])


class RunLogger(_Adapter):
    """For `log(metrics, step=)`, as of wandb and trackio, or `track(value, name=, step=)`, as of aim."""

    kinds: ClassVar[dict[str, str]] = {"histograms": "Histogram", "images": "Image"}

    def write(self, record: MetricRecord) -> None:
        """Writes a record in one call."""
        refused: list[str] = []
        values: dict[str, Any] = {**record.scalars, **self._texts(record.texts)}
        for kind, made in (("histograms", record.histograms), ("images", record.images)):
            if not made:
                continue
            make = self._class(self.kinds[kind])
            if make is None:
                refused.append(kind)
                continue
            for name, value in made.items():
                values[name] = make(_finite(value) if kind == "histograms" else value)
        if values:
            self._log(values, record.step)
        self.refuse(refused)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._writer.log(values, step=step)

    def _texts(self, texts: dict[str, str]) -> dict[str, Any]:
        return dict(texts)

    def _class(self, name: str) -> Callable[..., Any] | None:
        # The classes of values are in the package of the run.
        kind = self._writer if inspect.ismodule(self._writer) else type(self._writer)
        package = getattr(kind, "__module__", None) or kind.__name__
        found = getattr(importlib.import_module(package.partition(".")[0]), name, None)
        return found if callable(found) else None


class TrackingRun(RunLogger):
    """For `track(value, name=, step=)`, as of aim's Run."""

    kinds: ClassVar[dict[str, str]] = {"histograms": "Distribution", "images": "Image"}

    def _log(self, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            self._writer.track(value, name=name, step=step)

    def _texts(self, texts: dict[str, str]) -> dict[str, Any]:
        make = self._class("Text")
        return {name: text if make is None else make(text) for name, text in texts.items()}


class EventLogger(_Adapter):
    """For `log_scalar(event, value, step=)`, as of metrax's logging backends."""

    def write(self, record: MetricRecord) -> None:
        """Writes the record's scalars."""
        for name, value in record.scalars.items():
            self._writer.log_scalar(name, value, step=record.step)
        others = ("histograms", "images", "texts")
        self.refuse([kind for kind in others if getattr(record, kind)])


def _finite(values: Any) -> Any:
    return values if values.dtype.kind in "iu" else values[np.isfinite(values)]


_ADAPTERS: tuple[tuple[str, Callable[[Any], RecordWriter]], ...] = (
    ("write_scalars", ScalarWriter),
    ("add_scalar", SummaryWriter),
    ("log_metrics", MetricsLogger),
    ("track", TrackingRun),
    ("log_scalar", EventLogger),
    ("log", RunLogger),
)
"""The method that shows what an object is, in the order of preference, and its adapter."""


class TensorBoardWriter:
    """See `tensorboard`."""

    takes_records: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """Imports tensorboardX."""
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(
                f"hcb.tensorboard: folder is {type(folder).__name__} {folder!r:.80}, expected the path of a folder, "
                "such as 'runs/1'"
            )
        if Path(folder).is_file():
            raise NotADirectoryError(
                errno.ENOTDIR,
                "hcb.tensorboard writes files into a folder, and this is a file: give a folder",
                str(folder),
            )
        refuse_unwritable(Path(folder), "hcb.tensorboard")
        self._folder, self._options = os.fspath(folder), options
        self._library = _tensorboardx()
        self._writer: Any = None
        self._adapter: SummaryWriter | None = None

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"tensorboard {self._folder}"

    def open(self) -> None:
        """Makes the folder and a new event file in it."""
        os.makedirs(self._folder, exist_ok=True)
        self._writer = self._library.SummaryWriter(self._folder, **self._options)
        self._adapter = SummaryWriter(self._writer)

    def write(self, record: MetricRecord) -> None:
        """Writes a record."""
        if self._adapter is None:
            raise ValueError(f"{self.name} is not open: pass it in writers= of outfeed_receiver")
        self._adapter.write(record)

    def flush(self) -> None:
        """Writes the buffered events to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = self._adapter = None


@hide_frames
def tensorboard(folder: str | os.PathLike[str], **options: Any) -> TensorBoardWriter:
    """Returns a writer of metrics to TensorBoard's event files, through tensorboardX.

    Scalars, histograms, images and texts arrive as such, with the time of their emission on the device.

    Args:
        folder: the run's folder, such as `runs/1`; made if it does not exist.
        **options: for `tensorboardX.SummaryWriter`, such as `flush_secs=10`.

    Raises:
        HostCallbackError: the package tensorboardX is missing.
        TypeError: `folder` is not a path.
        OSError: the folder cannot be made there: it is a file, or the folder above it cannot be written.

    Example:
        with hcb.outfeed_receiver(writers=[hcb.tensorboard("runs/1")]):
            train()
    """
    return TensorBoardWriter(folder, options)


def _tensorboardx() -> Any:
    try:
        import tensorboardX
    except ImportError as error:
        raise HostCallbackError(
            "hcb.tensorboard needs the package tensorboardX: pip install 'hostcallback[tensorboard]'"
        ) from error
    return tensorboardX
