"""The receiver thread of one device: drains its source through the dispatcher."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from hostcallback.receiver.errors import CorruptStreamError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Registry
from hostcallback.receiver.runtime.dispatch import calls, dispatcher, gil_share
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sinks.batches import last_element
from hostcallback.receiver.sources.ring_batch import LostCopiesError
from hostcallback.receiver.sources.source import Batch, Source

MakeCalls = Callable[[str, Any, Callable[[Batch], None]], calls.Calls]
"""Makes the `Calls` of a device from its name, its source and the function that delivers a batch."""

FEW = 4
"""Batches of fewer messages are delivered without a `GilThrottle`, whose set-up would take longer than they do."""

_tokens = itertools.count(1)

_at_start: list[Callable[[], None]] = []


def at_start(function: Callable[[], None]) -> None:
    """Makes each receiver thread call `function` before it delivers anything that it reads from now on."""
    _at_start.append(function)


RECORDED_FAILURES = 512
"""Failures of one check in a row that are read of a batch at least if a log takes them, with their steps."""


class DeviceReceiver:
    """One daemon thread that delivers one device's messages in order.

    Attributes:
        name: the device's name, such as `cpu:0`.
        source: source of the frames.
        calls: runs the host functions of the device's calls.
        dispatcher: delivers the messages.
        thread: the daemon thread.
        is_working: whether the sink that runs does work of this package: it is not stalled, however long it takes.
    """

    def __init__(
        self,
        name: str,
        device: Any,
        source: Source,
        registry: Registry,
        scope: Scope,
        make_calls: MakeCalls = calls.CallThreads,
    ) -> None:
        """Starts the thread. The messages count in `scope`.

        Args:
            name: the device's name.
            device: the object that tap functions get as `device`.
            source: source of the frames.
            registry: consumer ids to consumers.
            scope: the first scope.
            make_calls: makes `calls`.
        """
        self.name = name
        self.source = source
        self.calls = make_calls(name, source, self._deliver)
        self._share = gil_share.GilThrottle()
        self.dispatcher = dispatcher.Dispatcher(
            registry, name, device, scope, self._enter_scope, self.calls, source=source
        )
        self.is_working = False
        self._switches: dict[int, Scope] = {}
        self._stopping = False
        self._leaving = False
        self._prepared = 0  # number of functions of `_at_start` that were called
        self._keeps = False
        self._progress = threading.Condition()  # protects _consumed and _awaited
        self._consumed = 0
        self._discarded = 0
        self._awaited: list[int] = []  # numbers of frames for which threads wait; few, and mostly none
        scope.opened(name)
        self.thread = threading.Thread(target=self._run, name=f"hostcallback-{name}", daemon=True)
        self.thread.start()

    @property
    def scope(self) -> Scope:
        """The scope that counts the messages delivered now."""
        return self.dispatcher.scope

    def switch(self, scope: Scope) -> None:
        """Sends an END_OF_STREAM frame. Messages before it count in the current scope, later ones in `scope`."""
        token = next(_tokens)
        # Both before the frame is sent, because the receiver thread may deliver it at once.
        self._switches[token] = scope
        if self.dispatcher.skips:
            self._leave_out()  # a recorder may have come
        scope.opened(self.name)
        self.source.send_end(token)

    def skip(self, on: bool, keeps: bool) -> None:
        """Starts or stops leaving messages out, as `Dispatcher.skips` says. Any thread.

        What no recorder or forwarder takes is not emitted: a loop then runs about as fast as with its taps off.

        Args:
            on: whether they are left out.
            keeps: whether the queue is recorded itself.
        """
        self.dispatcher.skips = on
        self._keeps = keeps
        self._leave_out()

    def _leave_out(self) -> None:
        scopes = (self.scope, *self._switches.values())
        kept = self._keeps or any(scope.batch_sinks for scope in scopes)
        self.source.leave_out(self.dispatcher.skips and not kept)

    def stop(self, timeout_sec: float, *, drain: bool = True) -> bool:
        """Ends the thread after the frames queued so far. Returns False if it is still busy at the timeout.

        Without `drain` the thread ends after its current batch and leaves the rest to another receiver.
        """
        # `_leaving` first: the thread looks at it once `_stopping` has made it return from a read.
        self._leaving = not drain
        self._stopping = True
        self.source.wake()
        self.thread.join(timeout_sec)
        self.dispatcher.feed.stop()
        return not self.thread.is_alive()

    def running_tap(self) -> tuple[Consumer, float] | None:
        """Returns the consumer whose sink runs now and for how many seconds; None between messages.

        If it takes the elements of a batch one by one, these are the seconds of the element.
        """
        # The tap first, and the dispatcher sets it last: in the other order, the time since the last message before a
        # pause could be taken for the duration of the tap that begins now, and end a wait with TapTimeoutError.
        consumer, since = self.dispatcher.current, self._since()
        return None if consumer is None else (consumer, perf_counter() - since)

    def progress(self) -> tuple[int, float]:
        """Returns a value that changes whenever a batch is delivered, or a sink or its next element begins."""
        return self._consumed, self._since()

    def _since(self) -> float:
        if self.is_working:
            return perf_counter()
        return max(self.dispatcher.current_since, last_element(self.thread.ident))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """See `Runtime.working`."""
        self.is_working = True
        try:
            yield
        finally:
            self.dispatcher.current_since = perf_counter()
            self.is_working = False

    def queued(self) -> int:
        """Returns the number of frames that the device has emitted and that are not delivered yet."""
        emitted = self.source.counters().emitted
        with self._progress:
            return max(0, emitted - self._consumed - self.dispatcher.delivered)

    def wait_consumed(self, emitted: int, timeout_sec: float) -> bool:
        """Waits until the first `emitted` frames are delivered. Returns False after `timeout_sec`.

        A frame that is withdrawn meanwhile, as that of a call that fails, is no longer waited for after `timeout_sec`.
        """
        self.source.wake()  # in a busy stream the reader sleeps between two reads
        self._share.forget()  # the thread that competed for the interpreter lock is mostly the one that waits here
        with self._progress:
            self._awaited.append(emitted)
            try:
                # `delivered` changes without the lock, message by message. A change that is missed is seen after
                # `timeout_sec`.
                if self._progress.wait_for(
                    lambda: self._consumed + self.dispatcher.delivered >= emitted, timeout_sec
                ):
                    return True
            finally:
                self._awaited.remove(emitted)
            done = self._consumed + self.dispatcher.delivered
        return done >= min(emitted, self.source.counters().emitted)

    def describe_backlog(self) -> str:
        """Says how many messages wait and for which function; empty if none wait and no function runs."""
        queued, running = self.queued(), self.running_tap()
        consumer = self.dispatcher.upcoming if running is None else running[0]
        if consumer is None:
            return f"{queued:,} message(s) of {self.name}" if queued else ""
        return f"{max(1, queued):,} message(s) of {self.name}, at the tap {consumer.name} ({consumer.source_line})"

    def describe_wait(self) -> str:
        """Says which function runs, how many messages are queued behind it, and what the user can do."""
        counters = self.source.counters()
        queued = f"{self.queued()} message(s) ({counters.queued_bytes} bytes) queued"
        if counters.waiting_producers:
            queued += f" and {counters.waiting_producers} emission(s) waiting for room"
        call = self.calls.longest()
        running = self.running_tap()
        if call is not None and (running is None or call[1] > running[1]):
            consumer, seconds = call
            return (
                f"device {self.name}: {consumer.name}, the host function of the call at "
                f"{consumer.source_line}, has been running for {seconds:.1f} s, and a program waits for it, "
                f"{queued}: make it return sooner, or give it more time (timeout_sec=)"
            )
        if running is None:
            return (
                f"device {self.name}: the messages were not all delivered in time, {queued}: "
                "give more time (timeout_sec=) or emit less"
            )
        consumer, seconds = running
        return (
            f"device {self.name}: tap {consumer.name} at {consumer.source_line} has been running for "
            f"{seconds:.1f} s, {queued} behind it: make the tap return sooner, or give it more time "
            "(timeout_sec=); the messages are kept and are delivered when it returns. (A tap that runs tapped "
            "programs on its own device waits for itself once the queue is full.)"
        )

    def _run(self) -> None:
        self._list_failures(self.scope)
        try:
            while True:
                try:
                    turn_from = self._turn_from()
                    self._share.in_turn = turn_from > 0
                    batch = self.source.read(None, turn_from)
                except LostCopiesError as error:
                    logger.error("%s: %s", self.name, error)
                    self.dispatcher.lose(str(error), error.count)
                    continue
                except CorruptStreamError as error:
                    logger.error("%s: %s", self.name, error)
                    self.dispatcher.lose(f"damaged stream on {self.name}: {error}", error.skipped)
                    self._resynchronize()
                    continue
                if batch is not None:
                    if self._prepared < len(_at_start):
                        self._prepare()
                    self._deliver(batch)
                    if self._leaving:
                        return
                    continue
                with self._progress:
                    self._consume(0)
                if self._stopping and not self.queued():
                    return
        except BaseException:
            # The loop should not raise. If it does, the log must say so, because a dead thread blocks the device.
            logger.critical("receiver thread of %s failed", self.name, exc_info=True)
            raise
        finally:
            self.scope.closed(self.name)

    def _prepare(self) -> None:
        new = _at_start[self._prepared :]
        self._prepared += len(new)
        for function in new:
            function()

    def _turn_from(self) -> int:
        # Batch sinks may release the interpreter lock for long, as while they write to a disk.
        return FEW if self._share.wants_turn and not self.dispatcher.feed.sinks else 0

    def _deliver(self, batch: Batch) -> None:
        count = batch.count + sum(batch.folded)
        if batch.count < FEW:
            self._deliver_all(batch, None)
        else:
            with self._share:
                self._deliver_all(batch, self._share)
        with self._progress:
            # Both in one step: a waiting thread that saw only one of them would count the batch twice, or not
            # at all.
            self.dispatcher.delivered = 0
            self._consume(count)

    def _consume(self, count: int) -> None:
        # Frames that the source discarded (they hold no message) count as consumed with the frames around them.
        discarded = self.source.discarded()
        self._consumed += count + discarded - self._discarded
        self._discarded = discarded
        # Not after each batch: a thread that wakes up for nothing competes with this one for the interpreter lock.
        if self._awaited and self._consumed >= min(self._awaited):
            self._progress.notify_all()

    def _deliver_all(self, batch: Batch, share: gil_share.GilThrottle | None) -> None:
        try:
            messages = self.dispatcher.decode(batch)
        # The thread must live on: a dead receiver blocks its device. The batch is released for the same
        # reason.
        except MemoryError as error:
            reason = f"no memory for messages of {self.name}: {error}"
            self.dispatcher.lose(reason, batch.count)
            self.calls.fail_unread(batch, f"hostcallback: {reason}")
            batch.release()
            return
        # Decoded arrays are copies, so slow taps do not keep the memory of the ring.
        batch.release()
        with self.dispatcher.feed.while_delivering():
            self.dispatcher.deliver(messages, share)

    def _resynchronize(self) -> None:
        # The number of messages in damaged bytes is an estimate. All messages that are not queued count as consumed.
        counters = self.source.counters()
        with self._progress:
            self._consume(0)
            self._consumed = max(self._consumed, counters.emitted - counters.queued_messages)
            self._progress.notify_all()

    def _list_failures(self, scope: Scope) -> None:
        self.source.list_failures(0 if scope.recorder is None else RECORDED_FAILURES)

    def _enter_scope(self, token: int) -> None:
        scope = self._switches.pop(token, None)
        if scope is None or scope is self.scope:
            return
        old = self.scope
        self.dispatcher.set_scope(scope)
        self._list_failures(scope)
        old.closed(self.name)
