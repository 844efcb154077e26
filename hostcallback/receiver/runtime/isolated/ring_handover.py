"""Hands rings over to the reader process, waits for them, and takes them back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.runtime.isolated.shared_rings import SharedRingRouting, SharedRings
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.ring import RingSource

POLL_SEC = 0.002

Adopt = Callable[[str, RingSource], None]
"""Function that starts a receiver of this process on a ring, given the device's name and the ring."""


class HandedOverRings:
    """The rings of some devices that the reader process reads. Any thread.

    Attributes:
        folder: folder of their files and of the descriptions of their taps.
    """

    def __init__(
        self,
        rings: SharedRings,
        sources: Mapping[str, RingSource],
        adopt: Adopt,
        back_pressure: BackPressure,
    ) -> None:
        """Hands the rings over. No messages go there until `route`.

        Args:
            rings: owns the shared rings for as long as this process lives.
            sources: the rings that this process reads, by device name.
            adopt: starts reading a ring in this process after the reader process has ended.
            back_pressure: policy for when the reader process is slower than the devices emit.

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
        """Names of the devices."""
        return list(self._rings)

    @property
    def files(self) -> dict[str, Path]:
        """Files of the rings, by device name."""
        return self._files

    def route(self, registry: Registry, wanted: Callable[[Consumer], bool]) -> None:
        """Routes the taps for which `wanted` returns True to these rings, registered now or later."""
        self._routes = SharedRingRouting(registry, wanted)

    def end(self) -> None:
        """Takes the rings back after the reader process has ended. This process delivers the remaining messages."""
        # The routes end first, so that new messages already go to this process when it takes the rings.
        if self._routes is not None:
            self._routes.end()
        with self._changed:
            if self._ended:
                return
            # The rings stay in use, because programs that looked up the route before it ended still send there.
            for name, ring in self._rings.items():
                ring.take_over()
                self._adopt(name, ring)
            self._ended = True
            self._changed.notify_all()

    def emitted(self, name: str) -> int:
        """Returns the number of messages that the device has sent to its shared ring."""
        return self._rings[name].counters().emitted

    def queued(self, name: str) -> int:
        """Returns the number of messages in that ring that are not delivered."""
        return self._rings[name].counters().queued_messages

    def wait_delivered(self, name: str, emitted: int, timeout_sec: float) -> bool:
        """Waits until the first `emitted` messages of a device are delivered. Returns False after `timeout_sec`."""
        deadline = perf_counter() + timeout_sec
        while True:
            counters = self._rings[name].counters()
            # The counters are in shared memory: the reader process changes them, and can wake no thread here,
            # so this polls.
            if counters.emitted - counters.queued_messages >= emitted:
                return True
            with self._changed:
                if self._ended:
                    return True  # this process reads the ring now, and waits for it as for its other rings
                self._changed.wait(POLL_SEC)
            if perf_counter() > deadline:
                return False

    def describe(self, name: str) -> str:
        """Returns a sentence on the messages that the reader process has not delivered yet."""
        counters = self._rings[name].counters()
        return (
            f"device {name}: the process that reads its ring has {counters.queued_messages} message(s) "
            f"({counters.queued_bytes} bytes) to deliver"
        )
