"""One step's metrics, as writers get them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hostcallback.receiver.wire.dtypes import Array


@dataclass(slots=True)
class MetricRecord:
    """The metrics of one step, by name.

    Attributes:
        step: the step.
        time_ns: Unix time in nanoseconds at which the device emitted the last of them.
        scalars: numbers.
        histograms: the values of each histogram: one dimension, float64 or an integer dtype.
        images: shape (height, width, channels) with 1, 3 or 4 channels, uint8.
        texts: texts.
        bins: number of bins for each histogram, as the tap asked for.
    """

    step: int
    time_ns: int
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Array] = field(default_factory=dict)
    images: dict[str, Array] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    bins: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether the record has no metric."""
        return not (self.scalars or self.histograms or self.images or self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays and texts."""
        arrays = sum(array.nbytes for arrays in (self.histograms, self.images) for array in arrays.values())
        return arrays + sum(map(len, self.texts.values()))


class RecordWriter(Protocol):
    """Writes records. All methods but `open` are called on the writer's own thread, and may raise and block."""

    @property
    def name(self) -> str:
        """Name in reports."""

    def open(self) -> None:
        """Prepares to write, on the thread that enters the receiver."""

    def write(self, record: MetricRecord) -> None:
        """Writes a record. Steps need not increase."""

    def flush(self) -> None:
        """Writes everything that is buffered."""

    def close(self) -> None:
        """Releases what `open` took. A writer of the user stays open."""


class UnsupportedMetric(Exception):
    """A writer cannot hold a kind of metric; the text has `no` and the kind. It has written the rest of the record."""
