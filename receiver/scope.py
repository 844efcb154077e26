"""A scope: the stretch of a device's stream that one receiver accounts for."""

from __future__ import annotations

import threading

from receiver.back_pressure import BackPressure
from receiver.deferred import MAX_KEPT, DeferredErrors
from receiver.stats import DeviceStats


class Scope:
    """Collects the statistics and deferred errors of the messages delivered while it is current.

    A device's stream passes from one scope to the next at an END_OF_STREAM frame, in the stream's order.
    """

    def __init__(
        self, name: str, max_errors: int = MAX_KEPT, back_pressure: BackPressure | None = None
    ) -> None:
        """Makes a scope that no device is in yet.

        Args:
            name: appears in reports.
            max_errors: bounds the tap exceptions that are kept whole.
            back_pressure: of its devices; by default emissions wait for room.
        """
        self.name = name
        self.back_pressure = back_pressure or BackPressure()
        self.deferred = DeferredErrors(max_errors)
        self._stats: dict[str, DeviceStats] = {}
        self._open_devices: set[str] = set()
        self._changed = threading.Condition()  # protects _open_devices

    def device_stats(self, device: str) -> DeviceStats:
        """The live statistics of a device; only its receiver thread changes them."""
        return self._stats.setdefault(device, DeviceStats(device))

    @property
    def stats(self) -> list[DeviceStats]:
        """A snapshot, a row per device that had this scope."""
        return [s.copy() for s in list(self._stats.values())]

    def opened(self, device: str) -> None:
        """The device's stream is in this scope from here on."""
        with self._changed:
            self._open_devices.add(device)

    def closed(self, device: str) -> None:
        """The device's stream has left this scope: nothing more of it will come."""
        with self._changed:
            self._open_devices.discard(device)
            self._changed.notify_all()

    @property
    def has_open_devices(self) -> bool:
        """Whether messages of any device can still arrive here."""
        with self._changed:
            return bool(self._open_devices)

    def wait_closed(self, device: str, timeout_sec: float) -> bool:
        """Waits until the device has left this scope; False when `timeout_sec` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: device not in self._open_devices, timeout_sec)
