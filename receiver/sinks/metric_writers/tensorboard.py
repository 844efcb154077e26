"""The writer of metrics to TensorBoard's event files."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.sinks.metric_writers.adapters import SummaryWriter
from hostcallback.receiver.sinks.metric_writers.record import MetricRecord


class TensorBoardWriter:
    """See `tensorboard`."""

    takes_records: ClassVar[bool] = True

    def __init__(self, folder: str | os.PathLike[str], options: dict[str, Any]) -> None:
        """Imports tensorboardX."""
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(
                f"folder is a {type(folder).__name__} {folder!r:.80}, expected the path of a folder"
            )
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


def tensorboard(folder: str | os.PathLike[str], **options: Any) -> TensorBoardWriter:
    """Returns a writer of metrics to TensorBoard's event files, through tensorboardX.

    Scalars, histograms, images and texts arrive as such, with the time of their emission on the device.

    Args:
        folder: the run's folder, such as `runs/1`; made if it does not exist.
        **options: for `tensorboardX.SummaryWriter`, such as `flush_secs=10`.

    Raises:
        HostCallbackError: the package tensorboardX is missing.
        TypeError: `folder` is not a path.
        OSError: (on entering the receiver) the folder cannot be made.

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
