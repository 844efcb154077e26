"""Per-device statistics over all scopes of a process, for `hcb top` and the metrics of monitoring."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection

from hostcallback.receiver.runtime.device_stats import DeviceStats
from hostcallback.receiver.runtime.dispatch.scope import Scope


class Totals:
    """Adds up the statistics of closed scopes, and drops its references to the scopes. Any thread."""

    def __init__(self) -> None:
        """Starts without scopes."""
        self._lock = threading.Lock()  # protects everything below
        self._over: dict[str, DeviceStats] = {}
        self._open: list[Scope] = []
        self._counted: weakref.WeakKeyDictionary[Scope, list[DeviceStats]] = weakref.WeakKeyDictionary()

    def begin(self, scope: Scope, claimed: Collection[Scope]) -> None:
        """Adds a scope that claims devices. `claimed` has the scopes that hold other devices now."""
        with self._lock:
            self._settle(claimed)
            # A scope that is entered again continues its earlier statistics, so they leave the closed sums.
            for row in self._counted.pop(scope, ()):
                self._over[row.device].subtract(row)
            if scope not in self._open:
                self._open.append(scope)

    def rows(self, default: Scope, claimed: Collection[Scope]) -> list[DeviceStats]:
        """Returns one row per device, summed over all scopes and the default scope."""
        with self._lock:
            self._settle(claimed)
            found = {device: row.copy() for device, row in self._over.items()}
            for scope in (default, *self._open):
                _add(found, scope.stats)
            return list(found.values())

    def _settle(self, claimed: Collection[Scope]) -> None:
        for scope in list(self._open):
            if scope not in claimed and not scope.has_open_devices:
                self._open.remove(scope)
                rows = self._counted[scope] = scope.stats
                _add(self._over, rows)


def _add(totals: dict[str, DeviceStats], rows: list[DeviceStats]) -> None:
    for row in rows:
        totals.setdefault(row.device, DeviceStats(row.device)).add(row)
