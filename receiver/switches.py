"""Which taps are off at run time, by name; and which checks: by name, all of them, or on some devices."""

from __future__ import annotations

import ctypes
import fnmatch
import threading
from collections.abc import Iterable

from receiver.consumer import Consumer
from receiver.registry import Registry

EVERY_DEVICE = -1


class Switches:
    """Safe from any thread. What is switched applies to programs that run already, and to those to come.

    The native handlers have a table of their own, which is kept in step; other transports ask `is_off`.
    """

    def __init__(self) -> None:
        """Everything is on."""
        self._lock = threading.RLock()  # protects everything below
        self._library: ctypes.CDLL | None = None
        self._taps_off: dict[str, bool] = {}  # by pattern; the last one that matches a name counts
        self._off = False  # whether checks are off but for those of `_except`, or on but for those
        self._except: set[str] = set()
        self._without: dict[tuple[int, int], None] = {}  # consumer id and device id where it does not check
        self._aborting: set[int] = set()

    def after_fork_in_child(self) -> None:
        """A fresh lock."""
        self._lock = threading.RLock()

    def use(self, library: ctypes.CDLL, registry: Registry) -> None:
        """Keeps the table of the native library in step from now on."""
        with self._lock:
            self._library = library
            for consumer_id, device in self._without:
                self._tell(consumer_id, device, True)
            for device in self._aborting:
                self.abort_on_check([device], True)
            self._tell_all(registry)

    def set_all(self, registry: Registry, *, off: bool) -> None:
        """Switches all checks, whatever was said of single ones."""
        with self._lock:
            self._off = off
            self._except.clear()
            self._tell_all(registry)

    def set_named(self, registry: Registry, names: Iterable[str], *, off: bool) -> None:
        """Switches the checks of some names."""
        with self._lock:
            if off == self._off:
                self._except.difference_update(names)
            else:
                self._except.update(names)
            self._tell_all(registry)

    def set_matching(self, registry: Registry, pattern: str, *, off: bool) -> None:
        """Switches all taps whose names match a glob, checks included, those to come as well."""
        with self._lock:
            # A new table: `is_off` looks without the lock.
            earlier = {} if pattern == "*" else {p: o for p, o in self._taps_off.items() if p != pattern}
            self._taps_off = {**earlier, pattern: off} if off or earlier else {}
            self._tell_all(registry)

    def known(self, consumer: Consumer, without: Iterable[int] = ()) -> None:
        """A tap that some program has from now on, and the ids of the devices where it does not check."""
        with self._lock:
            for device in without:
                self._without[consumer.consumer_id, device] = None
                self._tell(consumer.consumer_id, device, True)
            self._tell(consumer.consumer_id, EVERY_DEVICE, self.is_off(consumer))

    def is_off(self, consumer: Consumer, device: int = EVERY_DEVICE) -> bool:
        """Whether a tap is off, on the device of that id if one is given."""
        if self._taps_off and consumer.is_switchable and self._is_tap_off(consumer.name):
            return True
        if not consumer.is_check:
            return False
        return self._off != (consumer.name in self._except) or (consumer.consumer_id, device) in self._without

    def _is_tap_off(self, name: str) -> bool:
        patterns = reversed(list(self._taps_off.items()))
        return next((off for pattern, off in patterns if fnmatch.fnmatchcase(name, pattern)), False)

    def abort_on_check(self, devices: Iterable[int], on: bool) -> None:
        """Whether a check that fails on one of these devices ends the launch it is in."""
        with self._lock:
            for device in devices:
                (self._aborting.add if on else self._aborting.discard)(device)
                if self._library is not None and self._library.hcb_abort_on_check(device, on):
                    raise MemoryError("the native library's table of switches is full")

    def aborts(self, device: int) -> bool:
        """What `abort_on_check` was told last."""
        return device in self._aborting

    def _tell_all(self, registry: Registry) -> None:
        if self._library is None:
            return
        # With exceptions, each check is told by itself.
        self._library.hcb_switch_all_checks(self._off and not self._except)
        for consumer in registry.consumers():
            self._tell(consumer.consumer_id, EVERY_DEVICE, self.is_off(consumer))

    def _tell(self, consumer_id: int, device: int, off: bool) -> None:
        if self._library is not None and self._library.hcb_switch(consumer_id, device, off):
            raise MemoryError("the native library's table of switches is full")
