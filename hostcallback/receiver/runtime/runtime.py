"""All receivers of this process: starts, assigns and waits for them, and says what a stalled device waits for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hostcallback.receiver import errors, processes
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message, Registry, device_text
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.device_receiver import DeviceReceiver, MakeCalls
from hostcallback.receiver.runtime.dispatch.calls import CallThreads
from hostcallback.receiver.runtime.dispatch.scope import Scope, ScopeSinks, Totals, never_entered
from hostcallback.receiver.runtime.rules.rule_table import RuleNotes, RuleTable, TakesRuleNotes
from hostcallback.receiver.runtime.stats import DeviceStats
from hostcallback.receiver.sinks import batches, factory
from hostcallback.receiver.sinks.call import ExportedTaps, exported_tap
from hostcallback.receiver.sinks.sharding.sinks import waiting_threads
from hostcallback.receiver.sources.back_pressure import BackPressure, Policy
from hostcallback.receiver.sources.source import Source

if TYPE_CHECKING:
    from hostcallback.receiver.taplog.flight.recorder import FlightRecorder

MAX_LOGS = 16
"""Tap logs of this process that are remembered."""

POLL_SEC = 0.05
"""Seconds between checks for a stalled tap while a thread waits. Progress wakes the thread at once."""


class Runtime:
    """The receivers of this process, one per device, and the consumers they deliver to.

    Attributes:
        registry: consumer ids to consumers.
        exported: the consumers of exported programs.
        default_scope: accounts for devices that no scoped receiver has claimed.
        rule_table: the rules of taps, and the checks that are off.
        logs: folders of the last tap logs that this process recorded.
        flight: keeps the rings in files; None until `record_flight`.
    """

    def __init__(self) -> None:
        """Starts no receiver: `start` does."""
        # Comes before the locks of scopes and sources. No thread waits for messages with it.
        self._lock = threading.RLock()  # protects what `reset` makes; signal handlers may wait for taps
        self.rule_table = RuleTable()
        self.reset()

    def reset(self) -> None:
        """Drops all state without joining threads. For a forked child, which has no receiver threads."""
        self._lock = threading.RLock()
        self.rule_table.after_fork_in_child()
        self._receivers: dict[str, DeviceReceiver] = {}
        self._claims: dict[str, Scope] = {}
        self._late: list[Scope] = []
        self.flight: FlightRecorder | None = None
        self._totals = Totals()
        self._observers: tuple[ScopeSinks, ...] = ()
        self.logs: list[str] = []
        self._accounting = 0  # number of clients that read the counters of each tap
        self.registry = Registry()
        make_tap = functools.partial(exported_tap, is_another_receiver_busy=self.is_another_receiver_busy)
        self.exported = ExportedTaps(self.registry, make_tap)
        self.default_scope = Scope("default")

    def start(
        self,
        name: str,
        device: Any,
        make_source: Callable[[], Source],
        make_calls: MakeCalls = CallThreads,
    ) -> DeviceReceiver:
        """Returns the receiver of a device, and starts it if it does not run."""
        with self._lock:
            receiver = self._receivers.get(name)
            # A dead receiver thread (its failure was logged) is replaced, because nothing else would drain
            # the ring.
            if receiver is None or not receiver.thread.is_alive():
                scope = self.scope_of(name)
                source = make_source()
                self.attach_flight_file(name, source)
                source.configure(scope.back_pressure)
                receiver = DeviceReceiver(name, device, source, self.registry, scope, make_calls)
                self._receivers[name] = receiver
                receiver.dispatcher.count_taps(self._accounting > 0)
                receiver.dispatcher.observe(self._observers)
                logger.debug("receiver of %s started", name)
            return receiver

    def note_log(self, directory: str | os.PathLike[str]) -> None:
        """Remembers the folder of a tap log that this process records; the control socket tells it to clients."""
        path = os.path.abspath(directory)
        self.logs = [*[known for known in self.logs if known != path], path][-MAX_LOGS:]

    def record_flight(self, directory: str | os.PathLike[str]) -> None:
        """Keeps the rings of all devices, now and later, in files in `directory`. A second call does nothing.

        Raises:
            OSError: the directory cannot be written.
        """
        with self._lock:
            if self.flight is not None:
                return
            from hostcallback.receiver.taplog.flight.recorder import FlightRecorder  # few have one

            self.flight = FlightRecorder(directory)
            receivers = list(self._receivers.values())
        # Without the lock, because copying a ring into a file takes time. Receivers that start now see `flight`.
        for receiver in receivers:
            self.flight.keep(receiver.name, receiver.source)
        self.registry.watch(self.flight.describe)

    def attach_flight_file(self, name: str, source: Source) -> None:
        """Moves the ring of a device into a file if a flight recorder exists and the ring is not in a file yet."""
        if self.flight is not None:
            self.flight.keep(name, source)

    def receivers(self, names: Iterable[str] | None = None) -> list[DeviceReceiver]:
        """Returns the running receivers: all, or those of the devices in `names`."""
        # Copies the table without the lock: a signal handler may call this while the thread that it interrupts holds
        # the lock.
        table = dict(self._receivers)
        return [table[name] for name in (table if names is None else names) if name in table]

    def scope_of(self, name: str) -> Scope:
        """The scope that takes what a device sends from now on."""
        return self._claims.get(name, self.default_scope)

    def warn_of_unwritten(self, message: Message) -> bool:
        """Warns if nothing takes a message of `hcb.metrics`; returns whether it has warned. Receiver threads."""
        if self.flight is not None or not self.serves(threading.current_thread()):
            return False  # the flight recorder has it, or a replay or a collector delivers it
        scope = self.scope_of(device_text(message.device))
        if scope.batch_sinks or scope.message_sinks is not None or scope.takes_rest:
            return False
        made = [each.made_at for each in [*never_entered] if isinstance(each, Scope)]
        if scope is self.default_scope and made:
            why, cure = f"the outfeed_receiver made at {made[0]} is not entered", "with receiver:"
        elif scope is self.default_scope:
            why, cure = "no receiver is open", "put the training into with hcb.outfeed_receiver({}):"
        else:
            why, cure = "the open receiver has no writers", "give it outfeed_receiver({})"
        logger.warning(
            "nothing writes the values of hcb.metrics at %s, because %s: %s",
            message.consumer.source_line, why, cure.format("writers=[hcb.csv('metrics.csv')]"),
        )  # fmt: skip
        return True

    def remove_files(self) -> None:
        """Removes the ring files, at a normal end of the process."""
        if self.flight is not None:
            self.flight.remove()

    def count_taps(self, on: bool) -> None:
        """Registers a client of the counters per tap (`Dispatcher.tap_counters`), or removes one."""
        with self._lock:
            before = self._accounting > 0
            self._accounting += 1 if on else -1
            after = self._accounting > 0
            if before != after:
                for receiver in self._receivers.values():
                    receiver.dispatcher.count_taps(after)

    def observe(self, observer: ScopeSinks, on: bool) -> None:
        """Starts or stops delivering all messages of this process to `observer` as well, in every scope.

        Wait for earlier messages first.
        """
        with self._lock:
            others = tuple(each for each in self._observers if each is not observer)
            self._observers = (*others, observer) if on else others
            for receiver in self._receivers.values():
                receiver.dispatcher.observe(self._observers)

    def note_rules(self, *recorders: TakesRuleNotes | None) -> list[RuleNotes]:
        """Notes the rules of taps in the logs of some recorders; the caller ends the notes."""
        for recorder in filter(None, recorders):
            self.note_log(recorder.directory)
        return [RuleNotes(self.rule_table, self.registry, recorder) for recorder in recorders if recorder]

    def stats(self, scope: Scope) -> list[DeviceStats]:
        """Returns the current statistics of a scope, with the queues of the devices that it still has."""
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
        """Returns the statistics of all devices over all scopes since the process began."""
        with self._lock:
            claimed = set(self._claims.values())
        return self._totals.rows(self.default_scope, claimed)

    def suppressed(self) -> dict[str, int]:
        """Returns, by tap name, the number of messages that rules have suppressed, for all registered taps."""
        found: dict[str, int] = {}
        for consumer in self.registry.consumers():
            if consumer.is_switchable:
                found[consumer.name] = found.get(consumer.name, 0) + self.rule_table.suppressed(consumer)
        return dict(sorted(found.items()))

    def claim(self, names: Iterable[str], scope: Scope) -> None:
        """Assigns devices to `scope`, whether their receivers run already or start later.

        Raises:
            DeviceClaimedError: another scope has one of the devices; no device is assigned then.
        """
        names = list(names)
        with self._lock:
            for name in names:
                owner = self._claims.get(name)
                if owner is not None:
                    raise owner.refusal(name, scope, names)
            self._totals.begin(scope, set(self._claims.values()))
            # Also devices without a receiver: `start` looks for the scope of a device here.
            for name in names:
                self._claims[name] = scope
                for receiver in self.receivers([name]):
                    # The scope first: the END_OF_STREAM frame is sent regardless of the policy, messages
                    # after it follow the new one.
                    receiver.switch(scope)
                    receiver.source.configure(scope.back_pressure)

    def release(self, names: Iterable[str], scope: Scope) -> None:
        """Ends `scope` on the devices with an END_OF_STREAM frame each. Later messages count in the default scope."""
        with self._lock:
            for name in names:
                if self._claims.get(name) is scope:
                    del self._claims[name]
                    for receiver in self.receivers([name]):
                        receiver.switch(self.default_scope)
                        receiver.source.configure(self.default_scope.back_pressure)

    def wait_delivered(
        self,
        names: Iterable[str] | None = None,
        *,
        deadline: float | None = None,
        stall_sec: float | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Waits until all messages emitted so far on the devices are delivered and their calls have returned.

        Args:
            names: the devices; all by default.
            deadline: `perf_counter()` value at which to give up; None for never.
            stall_sec: gives up if one invocation of a tap runs for longer; None for never.
            look: called repeatedly while waiting; may raise to stop the wait.

        Raises:
            TapTimeoutError: names the running function and the queued messages. Delivery goes on.
            ReentrantWaitError: a tap function or the host function of a call has called this.
        """
        self.check_not_reentrant("waiting for taps")
        receivers = self.receivers(names)
        look = look or _do_nothing

        def check(receiver: DeviceReceiver) -> None:
            look()
            self._check(receiver, deadline, stall_sec)

        # Before the targets are taken, so that the barrier waits for these messages too.
        if self.rule_table.admissions:
            self.rule_table.send_latest()
        self._wait_emitted(receivers, check)
        while self.rule_table.admissions and self.rule_table.latest_waits():
            self._wait_emitted(receivers, check)
        # Host functions of calls run on other threads: their frames have been consumed, they may still run.
        for receiver in receivers:
            running = list(receiver.calls.running)
            while running and not receiver.calls.wait(running, POLL_SEC):
                check(receiver)

    def _wait_emitted(
        self, receivers: Sequence[DeviceReceiver], check: Callable[[DeviceReceiver], None]
    ) -> None:
        # All targets first: messages that are emitted during the wait do not prolong it.
        targets = [(receiver, receiver.source.counters().emitted) for receiver in receivers]
        for receiver, emitted in targets:
            while not receiver.wait_consumed(emitted, POLL_SEC):
                check(receiver)

    def wait_closed(self, names: Iterable[str], scope: Scope, stall_sec: float) -> None:
        """Waits, after `release`, until all messages of `scope` are delivered.

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
            raise errors.TapTimeoutError(receiver.describe_wait())
        if late:
            raise errors.TapTimeoutError(f"the time was up. {receiver.describe_wait()}")

    def is_another_receiver_busy(self) -> bool:
        """Whether a receiver on another thread has messages to deliver. Does not count threads that wait for shards.

        Receiver threads call this while they hold locks, so it takes no lock that a waiting thread may hold.
        """
        here = threading.current_thread()
        return any(
            receiver.thread is not here and receiver.thread not in waiting_threads and receiver.queued() > 0
            for receiver in list(self._receivers.values())
        )

    def skip_taps(self, on: bool) -> None:
        """Starts or stops skipping the messages of all devices of this process. See `DeviceReceiver.skip`."""
        for receiver in self.receivers():
            receiver.skip(on, keeps=self.flight is not None)

    def let_go(self, on: bool) -> None:
        """Starts or stops overwriting the oldest messages of full queues, so that no program waits for room."""
        for receiver in self.receivers():
            policy = BackPressure(policy=Policy.OVERWRITE_OLDEST) if on else receiver.scope.back_pressure
            receiver.source.configure(policy)

    def progress(self) -> tuple[Any, ...]:
        """Returns a value that is equal to an earlier one only if no device has delivered anything in between."""
        own = [(*receiver.progress(), *receiver.calls.running) for receiver in self.receivers()]
        return (*own, batches.elements_delivered())

    def describe_backlog(self) -> str:
        """Says how many messages wait for which function on which device; empty if none do."""
        return "; ".join(filter(None, (receiver.describe_backlog() for receiver in self.receivers())))

    def describe_wait(self) -> str:
        """Says of each device with messages or running functions what it waits for; empty if there is none."""
        waiting = [r for r in self.receivers() if r.queued() or r.running_tap() or r.calls.running]
        return "; ".join(receiver.describe_wait() for receiver in waiting)

    def holds_programs(self) -> bool:
        """Whether a program waits for room in a queue or for a host function."""
        return any(
            bool(receiver.calls.running) or receiver.source.counters().waiting_producers > 0
            for receiver in self.receivers()
        )

    def serves(self, thread: threading.Thread) -> bool:
        """Whether a thread is a receiver thread or runs the host function of a call."""
        # A copy, as in `receivers`, but cheaper: each call of a watched step asks this twice.
        for receiver in list(self._receivers.values()):
            if receiver.thread is thread:
                return True
            if receiver.calls.running and receiver.calls.running_on(thread) is not None:
                return True
        return False

    def working(self) -> AbstractContextManager[None]:
        """A block of a sink that is no stalled tap, however long it takes: it does work of this package."""
        here = threading.current_thread()
        of_thread = (receiver.working() for receiver in self.receivers() if receiver.thread is here)
        return next(of_thread, contextlib.nullcontext())

    def check_not_reentrant(self, what: str) -> None:
        """Raises ReentrantWaitError if the caller is a receiver thread or runs the host function of a call."""
        here = threading.current_thread()
        for receiver in self.receivers():
            if receiver.thread is here:
                raise errors.ReentrantWaitError(
                    f"{what} from a tap function on the receiver thread of {receiver.name} would wait for itself: "
                    "do it on the thread that dispatches the computations"
                )
            caller = receiver.calls.running_on(here) if receiver.calls.running else None
            if caller is not None:
                raise errors.ReentrantWaitError(
                    f"{what} from {caller.name}, the host function of the call at {caller.source_line}, would wait for "
                    "the program that waits for it: do it on the thread that dispatches the computations"
                )

    def close_calls(self, message: str) -> None:
        """Fails all calls that wait for their host functions, and all later calls."""
        for receiver in self.receivers():
            receiver.source.close_calls(message)

    def defer_report(self, scope: Scope) -> None:
        """Keeps a scope whose receiver gave up waiting, so that the next report has the later errors of its taps."""
        with self._lock:
            self._late.append(scope)

    def take_deferred(self) -> list[errors.TapFunctionException]:
        """Removes and returns the deferred errors of all scopes that `scopes` returns."""
        found = []
        for scope in self.scopes():
            # Warnings are summed up once no more can come.
            goes_on = scope.deferred.on_error is OnError.WARN and scope.has_open_devices
            found.append(scope.deferred.take(ends=not goes_on))
        return [error for error in found if error is not None]

    def scopes(self) -> list[Scope]:
        """Returns all open scopes, the default one, and late ones (see `defer_report`).

        A late scope without open devices is returned for the last time.
        """
        scopes = self.current_scopes()
        with self._lock:
            # The last message of a scope without open devices is delivered, so its errors are complete.
            self._late = [scope for scope in self._late if scope.has_open_devices]
        return scopes

    def current_scopes(self) -> list[Scope]:
        """Returns the same as `scopes`, and late scopes again the next time."""
        scopes = [receiver.scope for receiver in self.receivers()]
        with self._lock:
            scopes += [*self._claims.values(), *self._late]
        return list(dict.fromkeys([self.default_scope, *scopes]))


def _do_nothing() -> None:
    pass


runtime = Runtime()
"""The receivers of this process."""

factory.tell_of_metrics(runtime.warn_of_unwritten)

processes.in_child(processes.Stage.RUNTIME, runtime.reset)


WARN_AFTER_SEC = 2.0
"""Seconds that a device waits for one tap invocation before the supervisor logs a warning."""

REPEAT_SEC = 30.0
"""Seconds between two warnings about the same device."""


class Supervisor:
    """Thread that sleeps in the native library until an emission has to wait. It uses no CPU while idle."""

    def __init__(self, runtime: Runtime) -> None:
        """Starts the daemon thread."""
        self._library = native.load()
        self._runtime = runtime
        self._thread = threading.Thread(target=self._run, name="hostcallback-supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        event = native.Event()
        while True:
            if not self._library.hcb_supervise_wait(-1, ctypes.byref(event)):
                continue
            if event.kind == native.EVENT_NOT_PINNED:
                logger.warning(
                    "the GPU driver could not pin memory for the taps of GPU %d: their copies go through pageable "
                    "memory, which is slower; free host memory, raise the limit of locked memory (ulimit -l), or give "
                    "taps less (HOSTCALLBACK_RING_BYTES, HOSTCALLBACK_BLOCK_BUDGET_BYTES)",
                    self._library.hcb_gpu_ring(event.device),  # its own inverse
                )
            elif event.kind == native.EVENT_STALL:
                try:
                    self._watch()
                except Exception:
                    logger.exception("the supervisor could not look at the stall of device %d", event.device)

    def _watch(self) -> None:
        """Logs slow taps until no emission waits for room."""
        reported: dict[str, float] = {}
        pause = threading.Event()
        while True:
            waiting = [r for r in self._runtime.receivers() if r.source.counters().waiting_producers]
            if not waiting:
                return
            for receiver in waiting:
                running = receiver.running_tap()
                now = perf_counter()
                recently = now - reported.get(receiver.name, -REPEAT_SEC) < REPEAT_SEC
                if running is not None and running[1] > WARN_AFTER_SEC and not recently:
                    reported[receiver.name] = now
                    logger.warning("the device waits for a slow tap: %s", receiver.describe_wait())
            pause.wait(WARN_AFTER_SEC / 4)
