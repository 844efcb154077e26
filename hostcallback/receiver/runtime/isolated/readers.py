"""All reader processes of this process: starts, waits for and ends them, and reads the rings taken back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol

from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Registry
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.isolated.options import NO_OPTIONS, ReaderOptions
from hostcallback.receiver.runtime.isolated.reader_process import ReceiverProcess
from hostcallback.receiver.runtime.isolated.ring_handover import HandedOverRings
from hostcallback.receiver.runtime.isolated.shared_rings import SharedRings
from hostcallback.receiver.sources.back_pressure import BackPressure
from hostcallback.receiver.sources.ring import RingSource

STOP_SEC = 10.0
POLL_SEC = 0.05


class Reader(Protocol):
    """A process that reads rings of this process.

    Attributes:
        rings: rings that it reads.
    """

    rings: HandedOverRings

    def collect(self) -> None:
        """Makes it report its statistics and errors, if this process wants them."""


class ReaderProcesses:
    """All reader processes of this process. Any thread.

    Attributes:
        processes: the reader processes that run.
        logs: folders of the tap logs that reader processes record, or recorded.
        adopted: by device, the receivers in this process of rings that were taken back from a reader process.
    """

    def __init__(
        self,
        registry: Registry,
        receivers: Mapping[str, DeviceReceiver],
        scope_of: Callable[[str], Scope],
        lock: AbstractContextManager[Any],
    ) -> None:
        """Starts without reader processes.

        Args:
            registry: consumers of this process.
            receivers: receivers of this process, by device.
            scope_of: returns the current scope of a device.
            lock: protects `receivers` and the state of this object.
        """
        self.processes: list[Reader] = []
        self.adopted: dict[str, DeviceReceiver] = {}
        self.logs: list[str] = []
        self._registry = registry
        self._receivers = receivers
        self._scope_of = scope_of
        self._lock = lock
        self._outside: set[str] = (
            set()
        )  # devices whose shared ring a reader process reads or is about to read
        self._shared: SharedRings | None = None

    def start(
        self,
        names: Iterable[str],
        scope: Scope,
        *,
        options: ReaderOptions = NO_OPTIONS,
        on_death: Callable[[], None] = lambda: None,
    ) -> ReceiverProcess | None:
        """Starts a child process that delivers the portable taps of some devices.

        Args:
            names: names of the devices.
            scope: scope that counts their messages.
            options: how the child process records and forwards the messages in addition.
            on_death: called if the child process ends without being told to.

        Returns:
            The process; None if no device has a ring that a child process can read.

        Raises:
            OSError: the child process cannot be started.
        """
        names = list(names)
        rings = self.hand_over(names, scope.back_pressure)
        if rings is None or len(rings.names) < len(names):
            logger.warning(
                "process=True: the taps of %s are delivered in this process: another one can read the rings of CPU "
                "devices, on the native transport, and one at a time",
                ", ".join(name for name in names if rings is None or name not in rings.names),
            )
        if rings is None:
            return None
        try:
            self.logs += [options.record] if options.record is not None else []
            process = ReceiverProcess(rings, self._registry, scope, options=options, on_death=on_death)
        except BaseException:
            self._give_back(rings.names)
            raise
        self.add(process)
        return process

    def hand_over(self, names: Iterable[str] | None, back_pressure: BackPressure) -> HandedOverRings | None:
        """Hands rings over to a reader process: of all devices, or of those named. Returns None if none is suitable.

        Raises:
            OSError: a ring cannot be put into a file.
        """
        with self._lock:
            chosen = [self._receivers[n] for n in (names or self._receivers) if n in self._receivers]
            sources = {
                r.name: r.source
                for r in chosen
                if r.name not in self._outside and isinstance(r.source, RingSource) and r.source.device >= 0
            }
            # Reserved under the lock: two receivers may start readers for the same devices at the same time.
            self._outside.update(sources)
        if not sources:
            return None
        try:
            self._shared = self._shared or SharedRings(self._registry)
            for name in sources:
                # A ring has one reader: the receiver that took it back from an earlier process must end first.
                adopted = self.adopted.get(name)
                if adopted is not None and not adopted.stop(STOP_SEC):
                    raise OSError(f"{adopted.describe_wait()}: no other process can read its ring meanwhile")
                with self._lock:
                    self.adopted.pop(name, None)
            return HandedOverRings(self._shared, sources, self._adopt, back_pressure)
        except BaseException:
            self._give_back(sources)
            raise

    def _give_back(self, names: Iterable[str]) -> None:
        with self._lock:
            self._outside.difference_update(names)

    def add(self, reader: Reader) -> None:
        """Adds a reader process, for which barriers wait."""
        with self._lock:
            self.processes.append(reader)

    def remove(self, reader: Reader) -> None:
        """Removes a reader process that does not read any more."""
        with self._lock:
            self.processes.remove(reader)
            self._outside.difference_update(reader.rings.names)

    def end(self, process: ReceiverProcess, *, drain_sec: float | None = None) -> None:
        """Ends a process that `start` started. This process delivers its taps from now on.

        `drain_sec`: seconds that it may wait for the collector, after an interrupt; by default what its options say.
        """
        with self._lock:
            if process not in self.processes:  # in a forked child, the process belongs to the parent
                return
        process.stop(drain_sec)
        self.remove(process)

    def backlogs(self) -> list[str]:
        """Returns a sentence for each device whose messages a reader process has to deliver."""
        rings = [(process.rings, name) for process in list(self.processes) for name in process.rings.names]
        return [ring.describe(name) for ring, name in rings if ring.queued(name)]

    def wait_delivered(
        self,
        names: set[str] | None,
        deadline: float | None,
        stall_sec: float | None,
        look: Callable[[], None],
    ) -> None:
        """Waits until the reader processes have delivered all messages emitted so far; see `Runtime.wait_delivered`."""
        with self._lock:
            # The wait itself is without the lock, which the listener of a dying process needs to hand its
            # rings back.
            readers = list(self.processes)
        for reader in readers:
            for name in reader.rings.names:
                emitted = reader.rings.emitted(name) if names is None or name in names else 0
                left, since = reader.rings.describe(name), perf_counter()
                while not reader.rings.wait_delivered(name, emitted, POLL_SEC):
                    look()
                    now = perf_counter()
                    if deadline is not None and now > deadline:
                        raise TapTimeoutError(f"the time was up. {reader.rings.describe(name)}")
                    # No thread of this process runs the taps, so a change of the counters is the only sign of progress.
                    if (left_now := reader.rings.describe(name)) != left:
                        left, since = left_now, now
                    elif stall_sec is not None and now - since > stall_sec:
                        raise TapTimeoutError(
                            f"{left}, and has delivered none for {stall_sec} s: make sure that its output is being "
                            "read, or give it more time (timeout_sec=); the messages are kept"
                        )
            reader.collect()

    def remove_files(self) -> None:
        """Removes the files of the rings, at a normal end of the process."""
        if self._shared is not None:
            self._shared.remove()

    def _adopt(self, name: str, source: RingSource) -> None:
        with self._lock:
            own = self._receivers[name]
            scope = self._scope_of(name)
            counters = source.counters()
            self.adopted[name] = DeviceReceiver(
                f"{name} (taken back)", own.device, source, self._registry, scope,
                continues_from=counters.emitted - counters.queued_messages,
            )  # fmt: skip
