"""The receiver thread of one device: drains its source through the dispatcher."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Consumer
from hostcallback.receiver.messages.registry import Registry
from hostcallback.receiver.runtime.dispatch.calls import Calls, CallThreads
from hostcallback.receiver.runtime.dispatch.dispatcher import Dispatcher
from hostcallback.receiver.runtime.dispatch.gil_share import GilThrottle
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.dispatch.tap_counters import TapCounters
from hostcallback.receiver.sources.ring_errors import LostCopiesError
from hostcallback.receiver.sources.source import Batch, Source
from hostcallback.receiver.wire import CorruptStreamError

MakeCalls = Callable[[str, Any, Callable[[Batch], None]], Calls]
"""Makes the calls of a device from its name, its source and what delivers a batch."""

FEW = 4
"""Fewer messages do not wait for arrangements about the interpreter lock, which take longer than they do."""

_tokens = itertools.count(1)


class DeviceReceiver:
    """One daemon thread that delivers one device's messages in order.

    Attributes:
        name: the device's name, such as `cpu:0`.
        source: where the frames come from.
        calls: runs what the device calls.
    """

    def __init__(
        self,
        name: str,
        device: Any,
        source: Source,
        registry: Registry,
        scope: Scope,
        make_calls: MakeCalls = CallThreads,
        *,
        before_release: Callable[[], None] | None = None,
        continues_from: int | None = None,
    ) -> None:
        """Starts the thread at once, accounting to `scope`.

        `before_release`: messages stay with the source until they are delivered and this was called, for another
        receiver to find if this process dies; else only until they are decoded. `continues_from`: how many messages of
        the source another receiver has had before.
        """
        self._before_release = before_release
        self.name = name
        self.source = source
        self.calls = make_calls(name, source, self._deliver)
        self._share = GilThrottle()
        self._dispatcher = Dispatcher(
            registry,
            name,
            device,
            scope,
            self._enter_scope,
            self.calls,
            continues=continues_from is not None,
            # A reader process copies nothing ahead: if it dies, its parent reads on from what was released, and would
            # record once more what had been copied.
            source=source if before_release is None else None,
        )
        self._switches: dict[int, Scope] = {}
        self._stopping = False
        self._leaving = False
        self._progress = threading.Condition()  # protects _consumed and _waiters
        self._consumed = continues_from or 0
        self._discarded = 0
        self._waiters = 0
        scope.opened(name)
        self._thread = threading.Thread(target=self._run, name=f"hostcallback-{name}", daemon=True)
        self._thread.start()

    @property
    def scope(self) -> Scope:
        """The scope that accounts for what is delivered now."""
        return self._dispatcher.scope

    @property
    def device(self) -> Any:
        """What tap functions get as `device`."""
        return self._dispatcher.device

    @property
    def thread(self) -> threading.Thread:
        """The receiver thread."""
        return self._thread

    def switch(self, scope: Scope) -> None:
        """Sends the end-of-stream sentinel: what is emitted before it stays with the current scope."""
        token = next(_tokens)
        self._switches[token] = scope
        scope.opened(self.name)
        self.source.send_end(token)

    def stop(self, timeout_sec: float, *, drain: bool = True) -> bool:
        """Ends the thread after the frames queued so far; False if it is still busy at the timeout.

        Without `drain`, after the batch that it delivers now: what is left is for another receiver.
        """
        self._leaving = not drain
        self._stopping = True
        self.source.wake()
        self._thread.join(timeout_sec)
        self._dispatcher.feed.stop()
        return not self._thread.is_alive()

    @property
    def tap_counters(self) -> TapCounters | None:
        """What is counted for each tap by itself; None while nobody wants to know."""
        return self._dispatcher.tap_counters

    def count_taps(self, on: bool) -> None:
        """Begins or ends counting for each tap."""
        self._dispatcher.count_taps(on)

    def running_tap(self) -> tuple[Consumer, float] | None:
        """The consumer whose sink runs now and for how many seconds; None between messages."""
        since, consumer = self._dispatcher.current_since, self._dispatcher.current
        return None if consumer is None else (consumer, perf_counter() - since)

    def queued(self) -> int:
        """Frames accepted from the device and not yet delivered."""
        emitted = self.source.counters().emitted
        with self._progress:
            return max(0, emitted - self._consumed - self._dispatcher.delivered)

    def wait_consumed(self, emitted: int, timeout_sec: float) -> bool:
        """Waits until the first `emitted` frames were delivered; False when `timeout_sec` passed."""
        self.source.wake()  # in a busy stream the reader rests between two looks
        self._share.forget()  # who waits was mostly who wanted it
        with self._progress:
            self._waiters += 1
            try:
                return self._progress.wait_for(
                    lambda: self._consumed + self._dispatcher.delivered >= emitted, timeout_sec
                )
            finally:
                self._waiters -= 1

    def describe_wait(self) -> str:
        """What it is doing and how much waits behind it, with the cure."""
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
        try:
            while True:
                try:
                    batch = self.source.read(None)
                except LostCopiesError as error:
                    logger.error("%s: %s", self.name, error)
                    self._dispatcher.lose(str(error), error.count)
                    continue
                except CorruptStreamError as error:
                    logger.error("%s: %s", self.name, error)
                    self._dispatcher.lose(f"damaged stream on {self.name}: {error}", error.skipped)
                    self._resynchronize()
                    continue
                if batch is not None:
                    self._deliver(batch)
                    if self._leaving:
                        return
                    continue
                with self._progress:
                    self._consume(0)
                if self._stopping and not self.queued():
                    return
        except BaseException:
            # Nothing above may raise; if it does, say so: a dead thread would block the device.
            logger.critical("receiver thread of %s failed", self.name, exc_info=True)
            raise
        finally:
            self.scope.closed(self.name)

    def _deliver(self, batch: Batch) -> None:
        count = batch.count + sum(batch.folded)
        if batch.count < FEW:
            self._deliver_all(batch, None)
        else:
            with self._share:
                self._deliver_all(batch, self._share)
        with self._progress:
            self._dispatcher.delivered = 0
            self._consume(count)

    def _consume(self, count: int) -> None:
        # Frames that turned out to be no message are through with those around them.
        discarded = self.source.discarded()
        self._consumed += count + discarded - self._discarded
        self._discarded = discarded
        if self._waiters:
            self._progress.notify_all()

    def _deliver_all(self, batch: Batch, share: GilThrottle | None) -> None:
        try:
            messages = self._dispatcher.decode(batch)
        except MemoryError as error:
            self._dispatcher.lose(f"no memory for messages of {self.name}: {error}", batch.count)
            batch.release()
            return
        # Decoded arrays are copies: however slow the taps are, the device has its room back at once.
        if self._before_release is None:
            batch.release()
        with self._dispatcher.feed.while_delivering():
            self._dispatcher.deliver(messages, share)
        if self._before_release is not None:
            self._before_release()
            batch.release()

    def _resynchronize(self) -> None:
        # How many messages a damaged stretch held is an estimate; what is not queued any more is over.
        counters = self.source.counters()
        with self._progress:
            self._consume(0)
            self._consumed = max(self._consumed, counters.emitted - counters.queued_messages)
            self._progress.notify_all()

    def _enter_scope(self, token: int) -> None:
        scope = self._switches.pop(token, None)
        if scope is None or scope is self.scope:
            return
        old = self.scope
        self._dispatcher.set_scope(scope)
        old.closed(self.name)
