"""Writers for tests."""

from __future__ import annotations

import threading
from typing import Any


class CollectingWriter:
    """Keeps what clu's MetricWriter would write."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.histograms: list[tuple[int, dict[str, Any]]] = []
        self.images: list[tuple[int, dict[str, Any]]] = []
        self.texts: list[tuple[int, dict[str, str]]] = []
        self.threads: set[str] = set()
        self.flushed = 0
        self.closed = False

    def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.rows.append((step, dict(scalars)))

    def write_histograms(self, step: int, arrays: dict[str, Any], num_buckets: dict[str, int]) -> None:
        self.histograms.append((step, {name: (array, num_buckets[name]) for name, array in arrays.items()}))

    def write_images(self, step: int, images: dict[str, Any]) -> None:
        self.images.append((step, images))

    def write_texts(self, step: int, texts: dict[str, str]) -> None:
        self.texts.append((step, texts))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


class BlockedWriter:
    """Blocks in the first call until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.entered = threading.Event()
        self.count = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.entered.set()
        self.let_go.wait(60)
        self.count += 1
