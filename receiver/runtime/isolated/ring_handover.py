"""Rings that another process reads for a while: handed over to it, waited for, and taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from hostcallback.receiver.messages.message import Consumer
from hostcallback.receiver.messages.registry import Registry
from hostcallback.receiver.runtime.isolated.shared_rings import SharedRingRouting, SharedRings
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.ring import RingSource

POLL_SEC = 0.002

Adopt = Callable[[str, RingSource], None]
"""Has this process read a ring from now on: the device's name, and the ring."""


class HandedOverRings:
    """The rings of some devices that another process reads. Any thread.

    Attributes:
        folder: where their files are, and the descriptions of their taps.
    """

    def __init__(
        self,
        rings: SharedRings,
        sources: Mapping[str, RingSource],
        adopt: Adopt,
        back_pressure: BackPressure,
    ) -> None:
        """Hands the rings over. Nothing goes there until `route`.

        Args:
            rings: has them, for as long as this process lives.
            sources: of the devices, by name: the rings that this process reads.
            adopt: reads a ring when the other process does not any more.
            back_pressure: what happens when it does not read as fast as the devices emit.

        Raises:
            OSError: a ring cannot be put into a file.
        """
        self.folder = rings.folder
        self._adopt = adopt
        self._routes: SharedRingRouting | None = None
        self._changed = threading.Condition()  # protects `_ended`
        self._ended = False
        self._rings = {name: rings.ring(name, source) for name, source in sources.items()}
        self._files = {name: rings.file(name) for name in sources}
        for name, ring in self._rings.items():
            ring.configure(back_pressure)
            sources[name].hand_over(ring)

    @property
    def names(self) -> list[str]:
        """Of the devices."""
        return list(self._rings)

    @property
    def files(self) -> dict[str, Path]:
        """Of the rings, by the devices' names."""
        return self._files

    def route(self, registry: Registry, wanted: Callable[[Consumer], bool]) -> None:
        """From now on taps for which `wanted` says so send there: those that programs have, and those to come."""
        self._routes = SharedRingRouting(registry, wanted)

    def end(self) -> None:
        """The other process does not read any more: what it has left, and what comes from now on, is delivered here."""
        if self._routes is not None:
            self._routes.end()
        with self._changed:
            if self._ended:
                return
            # Also what still comes from programs that were asked before the routes ended.
            for name, ring in self._rings.items():
                ring.take_over()
                self._adopt(name, ring)
            self._ended = True
            self._changed.notify_all()

    def emitted(self, name: str) -> int:
        """Messages that the device has sent there so far."""
        return self._rings[name].counters().emitted

    def wait_delivered(self, name: str, emitted: int, timeout_sec: float) -> bool:
        """Waits until the first `emitted` messages of a device were delivered; False if time is up."""
        deadline = perf_counter() + timeout_sec
        while True:
            counters = self._rings[name].counters()
            if counters.emitted - counters.queued_messages >= emitted:
                return True
            with self._changed:
                if self._ended:
                    return True  # this process has the ring now, and waits for it as for its own
                self._changed.wait(POLL_SEC)
            if perf_counter() > deadline:
                return False

    def describe(self, name: str) -> str:
        """What the other process has still to do, in a sentence."""
        counters = self._rings[name].counters()
        return (
            f"device {name}: the process that reads its ring has {counters.queued_messages} message(s) "
            f"({counters.queued_bytes} bytes) to deliver"
        )
