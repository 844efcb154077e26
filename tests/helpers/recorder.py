"""A tap function that records its arguments."""

from __future__ import annotations

import threading
from typing import Any


class Recorder:
    """Keeps every message, in order of delivery. Receiver threads of several devices may call it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.transforms: list[Any] = []
        self.devices: list[Any] = []
        self.kwargs: list[dict[str, Any]] = []
        self._lock = threading.Lock()  # one message has the same place in all lists

    def __call__(self, arg: Any, *, transforms: Any, device: Any, **kwargs: Any) -> None:
        with self._lock:
            self.values.append(arg)
            self.transforms.append(transforms)
            self.devices.append(device)
            self.kwargs.append(kwargs)

    def __len__(self) -> int:
        return len(self.values)

    def floats(self) -> list[float]:
        """The values as Python floats."""
        return [float(value) for value in self.values]

    def on(self, device: Any) -> list[Any]:
        """The values that came from one device."""
        return [v for v, d in zip(self.values, self.devices, strict=True) if d == device]
