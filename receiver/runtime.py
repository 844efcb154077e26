"""All receivers of this process: starts them, scopes them, waits for them, ends them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol

from receiver import lock_share
from receiver.apart.beside import BesideRings
from receiver.apart.outside import OutsideRings
from receiver.apart.process import ReceiverProcess
from receiver.back_pressure import BackPressure
from receiver.calls import CallThreads
from receiver.device_receiver import DeviceReceiver, MakeCalls
from receiver.errors import (
    DeviceClaimedError,
    ReentrantWaitError,
    TapFunctionException,
    TapTimeoutError,
)
from receiver.exported import ExportedTaps, exported_tap
from receiver.flight.recorder import FlightRecorder
from receiver.log import logger
from receiver.registry import Registry
from receiver.ring_source import RingSource
from receiver.scope import Scope
from receiver.shards import waiting_threads
from receiver.source import Source
from receiver.stats import DeviceStats
from receiver.switches import Switches
from receiver.totals import Totals

STOP_SEC = 10.0

POLL_SEC = 0.05
"""How often a waiter looks whether the tap it waits for has stalled; progress wakes it at once."""


class Apart(Protocol):
    """Another process that reads rings of this one.

    Attributes:
        rings: what it reads.
    """

    rings: OutsideRings

    def collect(self) -> None:
        """Has it report what came of the messages, where somebody here wants to know."""


class Runtime:
    """The receivers of this process, one per device, and the consumers they deliver to.

    Attributes:
        registry: consumer ids to consumers.
        exported: the consumers of exported programs.
        default_scope: accounts for devices that no scoped receiver has claimed.
        switches: which taps and checks are off.
        flight: keeps the rings in files, if it was asked for.
    """

    def __init__(self) -> None:
        """No receiver runs until `start`."""
        self._lock = threading.Lock()  # protects what `reset` makes
        self.switches = Switches()
        self.reset()

    def reset(self) -> None:
        """Forgets everything without touching threads: for a forked child, which has none."""
        self._lock = threading.Lock()
        self.switches.after_fork_in_child()
        lock_share.after_fork_in_child()
        self._receivers: dict[str, DeviceReceiver] = {}
        self._claims: dict[str, Scope] = {}
        self._late: list[Scope] = []
        self._adopted: dict[str, DeviceReceiver] = {}  # of rings that another process has read
        self._apart: list[Apart] = []
        self._outside: set[str] = set()  # devices with a ring that another process reads, or is about to
        self._beside: BesideRings | None = None
        self.flight: FlightRecorder | None = None
        self._totals = Totals()
        self._accounting = 0  # how many want each tap's figures
        self.registry = Registry()
        make_tap = functools.partial(exported_tap, others_deliver=self.others_deliver)
        self.exported = ExportedTaps(self.registry, make_tap)
        self.default_scope = Scope("default")

    def start(
        self,
        name: str,
        device: Any,
        make_source: Callable[[], Source],
        make_calls: MakeCalls = CallThreads,
    ) -> DeviceReceiver:
        """Starts the receiver of a device unless it runs; returns it."""
        with self._lock:
            receiver = self._receivers.get(name)
            if receiver is None or not receiver.thread.is_alive():
                scope = self._claims.get(name, self.default_scope)
                source = make_source()
                self.keep(name, source)
                source.configure(scope.back_pressure)
                receiver = DeviceReceiver(name, device, source, self.registry, scope, make_calls)
                self._receivers[name] = receiver
                receiver.account(self._accounting > 0)
                logger.debug("receiver of %s started", name)
            return receiver

    def record_flight(self, directory: str | os.PathLike[str]) -> None:
        """Keeps the rings of all devices, and of those to come, in files in `directory`; once in a process.

        Raises:
            OSError: nothing can be written there.
        """
        with self._lock:
            if self.flight is not None:
                return
            self.flight = FlightRecorder(directory)
            receivers = list(self._receivers.values())
        for receiver in receivers:
            self.flight.keep(receiver.name, receiver.source)
        self.registry.watch(self.flight.describe)

    def keep(self, name: str, source: Source) -> None:
        """Puts the ring of a device into a file, if there is a flight recorder and it is in none."""
        if self.flight is not None:
            self.flight.keep(name, source)

    def receivers(self, names: Iterable[str] | None = None) -> list[DeviceReceiver]:
        """The running receivers, all or those named."""
        with self._lock:
            names = self._receivers if names is None else names
            return [receiver for name in names for receiver in self._of(name)]

    def _of(self, name: str) -> list[DeviceReceiver]:
        return [table[name] for table in (self._receivers, self._adopted) if name in table]

    def receive_apart(
        self,
        names: Iterable[str],
        scope: Scope,
        *,
        record: str | None = None,
        process_index: int | None = None,
    ) -> ReceiverProcess | None:
        """Starts a process that delivers the taps of some devices that need nothing of this process.

        Args:
            names: of the devices.
            scope: accounts for them.
            record: a tap log's folder, for what that process delivers.
            process_index: of this process in a program of several.

        Returns:
            The process; None if no device has a ring that it could read.

        Raises:
            OSError: it cannot be started.
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
            process = ReceiverProcess(rings, self.registry, scope, record=record, process_index=process_index)
        except BaseException:
            self._give_back(rings.names)
            raise
        self.add_apart(process)
        return process

    def hand_over(self, names: Iterable[str] | None, back_pressure: BackPressure) -> OutsideRings | None:
        """Rings of devices, all or those named, for another process to read; None if there are none that it could.

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
            self._outside.update(sources)
        if not sources:
            return None
        try:
            self._beside = self._beside or BesideRings(self.registry)
            for name in sources:
                adopted = self._adopted.get(name)
                if adopted is not None and not adopted.stop(STOP_SEC):
                    raise OSError(f"{describe_wait(adopted)}: no other process can read its ring meanwhile")
                with self._lock:
                    self._adopted.pop(name, None)
            return OutsideRings(self._beside, sources, self._adopt, back_pressure)
        except BaseException:
            self._give_back(sources)
            raise

    def _give_back(self, names: Iterable[str]) -> None:
        with self._lock:
            self._outside.difference_update(names)

    def add_apart(self, reader: Apart) -> None:
        """Another process reads rings of this one: barriers wait for it."""
        with self._lock:
            self._apart.append(reader)

    def remove_apart(self, reader: Apart) -> None:
        """It does not any more."""
        with self._lock:
            self._apart.remove(reader)
            self._outside.difference_update(reader.rings.names)

    def end_apart(self, process: ReceiverProcess) -> None:
        """Ends a process that `receive_apart` started: its taps are delivered here from now on."""
        with self._lock:
            if process not in self._apart:  # that of a parent, of which this is a forked child
                return
        process.stop()
        self.remove_apart(process)

    def _adopt(self, name: str, source: RingSource) -> None:
        with self._lock:
            own = self._receivers[name]
            scope = self._claims.get(name, self.default_scope)
            counters = source.counters()
            self._adopted[name] = DeviceReceiver(
                f"{name} (beside)", own.device, source, self.registry, scope,
                continues_from=counters.emitted - counters.queued_messages,
            )  # fmt: skip

    def remove_files(self) -> None:
        """Removes what is kept in files: the process ends as it should."""
        if self.flight is not None:
            self.flight.remove()
        if self._beside is not None:
            self._beside.remove()

    def account(self, on: bool) -> None:
        """Somebody wants the figures of each tap from now on (see `DeviceReceiver.accounts`), or does not any more."""
        with self._lock:
            before = self._accounting > 0
            self._accounting += 1 if on else -1
            after = self._accounting > 0
            if before != after:
                for name in self._receivers:
                    for receiver in self._of(name):
                        receiver.account(after)

    def stats(self, scope: Scope) -> list[DeviceStats]:
        """A scope's statistics now, with the queues of those devices that it has still."""
        rows = scope.stats
        receivers = {receiver.name: receiver for receiver in self.receivers()}
        for row in rows:
            receiver = receivers.get(row.device)
            if receiver is not None and receiver.scope is scope:
                counters = receiver.source.counters()
                row.queued_messages, row.queued_bytes = receiver.queued(), counters.queued_bytes
                row.waiting_emissions = counters.waiting_producers
        return rows

    def totals(self) -> list[DeviceStats]:
        """The statistics of all devices over all scopes, since the process began."""
        with self._lock:
            claimed = set(self._claims.values())
        return self._totals.rows(self.default_scope, claimed)

    def suppressed(self) -> dict[str, int]:
        """By name of the taps that are known, how many messages their rules have kept from being sent."""
        found: dict[str, int] = {}
        for consumer in self.registry.consumers():
            if consumer.is_switchable:
                found[consumer.name] = found.get(consumer.name, 0) + self.switches.suppressed(consumer)
        return dict(sorted(found.items()))

    def claim(self, names: Iterable[str], scope: Scope) -> None:
        """Puts devices into `scope`, whether their receivers run already or start later.

        Raises:
            DeviceClaimedError: one of them is in another scope; none is claimed then.
        """
        names = list(names)
        with self._lock:
            for name in names:
                owner = self._claims.get(name)
                if owner is not None:
                    raise DeviceClaimedError(
                        f"device {name} already has the receiver {owner.name!r}, and a device has one receiver "
                        f"at a time: leave that `with` block first, or give this receiver other devices= "
                        f"(got {', '.join(names)})"
                    )
            self._totals.begin(scope, set(self._claims.values()))
            for name in names:
                self._claims[name] = scope
                for receiver in self._of(name):
                    receiver.switch(scope)
                    receiver.source.configure(scope.back_pressure)

    def release(self, names: Iterable[str], scope: Scope) -> None:
        """Ends `scope` on the devices: sends the sentinel through each; later messages are the default's."""
        with self._lock:
            for name in names:
                if self._claims.get(name) is scope:
                    del self._claims[name]
                    for receiver in self._of(name):
                        receiver.switch(self.default_scope)
                        receiver.source.configure(self.default_scope.back_pressure)

    def wait_delivered(
        self,
        names: Iterable[str] | None = None,
        *,
        deadline: float | None = None,
        stall_sec: float | None = None,
    ) -> None:
        """Waits until everything emitted so far on the devices has been delivered, and the calls in it are over.

        Args:
            names: the devices; all by default.
            deadline: the `perf_counter()` value to give up at; None for never.
            stall_sec: give up when one invocation of a tap has run for longer; None for never.

        Raises:
            TapTimeoutError: names what runs and how much is queued. Delivery goes on.
            ReentrantWaitError: called from a tap function, or the host function of a call.
        """
        self.refuse_reentry("waiting for taps")
        names = None if names is None else list(names)
        receivers = self.receivers(names)
        targets = [(receiver, receiver.source.counters().emitted) for receiver in receivers]
        for receiver, emitted in targets:
            while not receiver.wait_consumed(emitted, POLL_SEC):
                self._check(receiver, deadline, stall_sec)
        self._wait_apart(None if names is None else set(names), deadline, stall_sec)
        for receiver in receivers:
            running = receiver.calls.running()
            while not receiver.calls.wait(running, POLL_SEC):
                self._check(receiver, deadline, stall_sec)

    def _wait_apart(self, names: set[str] | None, deadline: float | None, stall_sec: float | None) -> None:
        with self._lock:
            readers = list(self._apart)
        for reader in readers:
            for name in reader.rings.names:
                emitted = reader.rings.emitted(name) if names is None or name in names else 0
                left, since = reader.rings.describe(name), perf_counter()
                while not reader.rings.wait_delivered(name, emitted, POLL_SEC):
                    now = perf_counter()
                    if deadline is not None and now > deadline:
                        raise TapTimeoutError(f"the time was up. {reader.rings.describe(name)}")
                    if (left_now := reader.rings.describe(name)) != left:
                        left, since = left_now, now
                    elif stall_sec is not None and now - since > stall_sec:
                        raise TapTimeoutError(
                            f"{left}, and has given nothing back for {stall_sec} s: does what reads its output stand "
                            "still? Or give it more time (timeout_sec=); the messages are kept"
                        )
            reader.collect()

    def wait_closed(self, names: Iterable[str], scope: Scope, stall_sec: float) -> None:
        """Waits until everything of `scope` has been delivered, after `release`.

        Raises:
            TapTimeoutError: one invocation of a tap has run for longer than `stall_sec`.
        """
        for receiver in self.receivers(names):
            while not scope.wait_closed(receiver.name, POLL_SEC):
                self._check(receiver, None, stall_sec)

    def check_stalled(self, stall_sec: float | None) -> None:
        """Raises TapTimeoutError if one invocation of a tap has run for longer on any device."""
        if stall_sec is not None:
            for receiver in self.receivers():
                self._check(receiver, None, stall_sec)

    def _check(self, receiver: DeviceReceiver, deadline: float | None, stall_sec: float | None) -> None:
        running = [*filter(None, (receiver.running_tap(), receiver.calls.longest()))]
        stalled = stall_sec is not None and any(seconds > stall_sec for _, seconds in running)
        late = deadline is not None and perf_counter() > deadline
        if stalled:
            raise TapTimeoutError(describe_wait(receiver))
        if late:
            raise TapTimeoutError(f"the time was up. {describe_wait(receiver)}")

    def others_deliver(self) -> bool:
        """Whether receivers on other threads have messages to deliver, other than those that wait for shards.

        Called on receiver threads, which hold locks then: it takes none that anybody holds while waiting.
        """
        here = threading.current_thread()
        return any(
            receiver.thread is not here and receiver.thread not in waiting_threads and receiver.queued() > 0
            for receiver in list(self._receivers.values())
        )

    def serves(self, thread: threading.Thread) -> bool:
        """Whether a thread is a receiver's, or runs a call's host function."""
        return any(r.thread is thread or r.calls.running_on(thread) is not None for r in self.receivers())

    def refuse_reentry(self, what: str) -> None:
        """Raises ReentrantWaitError when the calling thread is a receiver thread, or runs a call's host function."""
        here = threading.current_thread()
        for receiver in self.receivers():
            if receiver.thread is here:
                raise ReentrantWaitError(
                    f"{what} from a tap function on the receiver thread of {receiver.name} would wait for itself: "
                    "do it on the thread that dispatches the computations"
                )
            caller = receiver.calls.running_on(here)
            if caller is not None:
                raise ReentrantWaitError(
                    f"{what} from {caller.name}, the host function of the call at {caller.source_line}, would wait for "
                    "the program that waits for it: do it on the thread that dispatches the computations"
                )

    def close_calls(self, message: str) -> None:
        """Fails every call that waits for its host function, and those that are still to come."""
        for receiver in self.receivers():
            receiver.source.close_calls(message)

    def report_later(self, scope: Scope) -> None:
        """Keeps a scope whose receiver gave up waiting: what its taps still raise belongs into the next report."""
        with self._lock:
            self._late.append(scope)

    def take_deferred(self) -> list[TapFunctionException]:
        """Removes and returns what was deferred in every scope that is open, late or the default one."""
        found = [scope.deferred.take() for scope in self.scopes()]
        return [error for error in found if error is not None]

    def scopes(self) -> list[Scope]:
        """Every scope that is open, late or the default one; late ones that are through, for the last time."""
        scopes = [receiver.scope for receiver in self.receivers()]
        with self._lock:
            scopes += [*self._claims.values(), *self._late]
            # Their last message has been delivered: this report is their last.
            self._late = [scope for scope in self._late if scope.has_open_devices]
        return list(dict.fromkeys([self.default_scope, *scopes]))


def describe_wait(receiver: DeviceReceiver) -> str:
    """What a device's receiver is doing and how much waits behind it, with the cure."""
    counters = receiver.source.counters()
    queued = f"{receiver.queued()} message(s) ({counters.queued_bytes} bytes) queued"
    if counters.waiting_producers:
        queued += f" and {counters.waiting_producers} emission(s) waiting for room"
    call = receiver.calls.longest()
    running = receiver.running_tap()
    if call is not None and (running is None or call[1] > running[1]):
        consumer, seconds = call
        return (
            f"device {receiver.name}: {consumer.name}, the host function of the call at "
            f"{consumer.source_line}, has been "
            f"running for {seconds:.1f} s, and a program waits for it, {queued}: make it return "
            "sooner, or give it more "
            "time (timeout_sec=)"
        )
    if running is None:
        return (
            f"device {receiver.name}: the messages were not all delivered in time, {queued}: "
            "give more time (timeout_sec=) or emit less"
        )
    consumer, seconds = running
    return (
        f"device {receiver.name}: tap {consumer.name} at {consumer.source_line} has been running for "
        f"{seconds:.1f} s, {queued} behind it: make the tap return sooner, or give it more time "
        "(timeout_sec=); the messages are kept and are delivered when it returns. (A tap that runs tapped "
        "programs on its own device waits for itself once the queue is full.)"
    )


runtime = Runtime()
"""This process's receivers."""
