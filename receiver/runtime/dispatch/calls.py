"""The calls of one device: their host functions run, and their results go back to the programs that wait for them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import CallFailedError, TapFailure
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Consumer, Message
from hostcallback.receiver.runtime.dispatch.interrupts import HeldInterrupts
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.wire import ALIGNMENT, decode_header

IDLE_SEC = 10.0
"""A thread that runs host functions ends when it had none to run for so long."""

LOOK_SEC = 0.05
"""How often a thread that waits for its own call's turn looks whether it was interrupted."""

_INTERRUPTED = "hostcallback: a call was interrupted (KeyboardInterrupt) before its host function ran"

Array = np.ndarray[Any, Any]


class Call(NamedTuple):
    """A message that a program waits for the reply to, and the scope that accounts for it."""

    message: Message
    scope: Scope


@dataclass(frozen=True, slots=True)
class _Running:
    consumer: Consumer
    thread: threading.Thread
    since: float


class _ThisThread(threading.local):
    """The calling thread.

    Attributes:
        dispatched: whether it runs a host function for a program that it dispatched, and runs, itself.
    """

    dispatched = False


this_thread = _ThisThread()


class ThreadFor(threading.Thread):
    """A thread that runs a host function for the one that makes it, which waits for it."""

    def __init__(self, target: Callable[[], None]) -> None:
        """`target` must not raise."""
        self.waiting = threading.current_thread()
        super().__init__(target=target, name=self.waiting.name, daemon=True)


class Calls:
    """What all kinds of calls share: which of them run, and what becomes of what they raise.

    A host function never runs on the device's receiver thread, which goes on: so it may run programs with taps and
    calls itself. `start` and `refuse` belong to whoever delivers, the rest is for any thread.
    """

    def __init__(self, device_name: str, deliver: Callable[[Batch], None]) -> None:
        """Makes the calls of one device.

        Args:
            device_name: for reports.
            deliver: delivers what was read, which ends in `start` for a call.
        """
        self._device_name = device_name
        self._deliver = deliver
        self._taken: list[Call] | None = None  # of a thread that runs what it reads itself; whose turn it is
        self._changed = threading.Condition()  # protects everything below
        self._running: dict[int, _Running] = {}  # by sequence number
        self._waiters = 0

    def start(self, message: Message, scope: Scope) -> None:
        """Has the message's sink make its results, and replies with them. Does not wait for that.

        What the sink raises fails the program that waits, and is deferred in `scope`, which stays open until then.
        """
        call = Call(message, scope)
        scope.call_began(self._device_name)
        if self._taken is None:
            self._start(call)
        else:
            self._note(call, threading.current_thread())
            self._taken.append(call)

    def refuse(self, seq: int, consumer_id: int) -> None:
        """Fails the program that waits for the reply to a message without a consumer."""

    def running(self) -> list[int]:
        """The sequence numbers of the calls whose host functions run."""
        return list(self._running)  # without the lock: a signal handler may ask while its thread has it

    def longest(self) -> tuple[Consumer, float] | None:
        """The consumer whose host function has been running for longest, and for how many seconds."""
        first = min(list(self._running.values()), key=lambda running: running.since, default=None)
        return None if first is None else (first.consumer, perf_counter() - first.since)

    def running_on(self, thread: threading.Thread) -> Consumer | None:
        """The consumer whose host function runs on that thread."""
        while isinstance(thread, ThreadFor):
            thread = thread.waiting
        return next((r.consumer for r in list(self._running.values()) if r.thread is thread), None)

    def wait(self, calls: Collection[int], timeout_sec: float) -> bool:
        """Waits until the host functions of these calls are over; False when `timeout_sec` passed."""
        with self._changed:
            self._waiters += 1
            try:
                return self._changed.wait_for(lambda: self._running.keys().isdisjoint(calls), timeout_sec)
            finally:
                self._waiters -= 1

    def _start(self, call: Call) -> None:
        """Runs a call that nobody has read for himself."""
        raise NotImplementedError

    def _take(self, batch: Batch, end: Callable[[], None]) -> Call | None:
        # Delivers a call that this thread has read. None if it has no consumer or cannot be decoded.
        taken: list[Call] = []
        self._taken = taken
        try:
            self._deliver(batch)
        finally:
            self._taken = None
            end()
        return taken.pop() if taken else None

    def _run(self, call: Call, interrupts: HeldInterrupts | None = None) -> list[Array]:
        """Runs the host function, during which `interrupts` are let through.

        Raises:
            CallFailedError: it raised; that is accounted for.
        """
        consumer = call.message.consumer
        try:
            if interrupts is None:
                results: list[Array] = consumer.sink(call.message)
            else:
                interrupts.allow()
                try:
                    results = consumer.sink(call.message)
                finally:
                    interrupts.hold()
        except BaseException as error:  # whatever it is, it belongs to the program that waits
            if interrupts is not None:
                interrupts.note(error)
            failure = TapFailure(
                error,
                consumer.name,
                consumer.source_line,
                self._device_name,
                call.message.seq,
                consumer.transforms,
                consumer.kwargs,
            )
            call.scope.deferred.add_failure(failure)
            told = "".join(traceback.format_exception(error))
            self._end(call, failed=True)
            raise CallFailedError(f"hostcallback: a call failed: {failure.describe()}\n{told}") from None
        # Before the reply: who waits for the program finds the books closed.
        self._end(call, failed=False)
        return results

    def _note(self, call: Call, thread: threading.Thread) -> None:
        running = _Running(call.message.consumer, thread, perf_counter())
        with self._changed:
            self._running[call.message.seq] = running

    def _end(self, call: Call, *, failed: bool) -> None:
        with self._changed:
            running = self._running.pop(call.message.seq)
            if self._waiters:
                self._changed.notify_all()
        call.scope.call_ended(self._device_name, perf_counter() - running.since, failed=failed)


class CallThreads(Calls):
    """The calls of programs that call through a ring.

    A program that runs on a Python thread, such as the one that dispatched it, has that thread run the host function.
    One that runs on a thread of XLA waits without it: daemon threads run the host functions, as many as run at a time.
    The program goes on on the one that did, which is a Python thread: calls in a loop change threads once.
    """

    def __init__(self, device_name: str, source: RingSource, deliver: Callable[[Batch], None]) -> None:
        """See `Calls`."""
        super().__init__(device_name, deliver)
        self._source = source
        source.call_on_own_threads(self._call_here)

    def refuse(self, seq: int, consumer_id: int) -> None:
        """See `Calls`."""
        self._source.fail(seq, _unknown(consumer_id))

    def _call_here(self, own: int, resumed: bool) -> bool:
        # For a program that runs on this thread, and has emitted the call `own`. Interrupts would leave the books half
        # kept: they come when the program has let go of the thread.
        try:
            interrupts = HeldInterrupts()
        except KeyboardInterrupt:
            return True
        dispatched, this_thread.dispatched = this_thread.dispatched, not resumed
        try:
            call = self._take_own(own, interrupts)
            if call is not None:
                self._answer(call, interrupts)
        except BaseException as error:
            if not isinstance(error, CallFailedError):
                logger.exception("a call could not be made")
            self._source.withdraw_own_call(own, str(error))
        this_thread.dispatched = dispatched
        try:
            interrupts.end()
        except KeyboardInterrupt:
            return True
        return interrupts.noted

    def _take_own(self, own: int, interrupts: HeldInterrupts) -> Call | None:
        while (batch := self._source.read_own_call(own, LOOK_SEC)) is None:
            if self._source.own_call_ended(own):
                return None
            if interrupts.noted and self._source.withdraw_own_call(own, _INTERRUPTED):
                return None
        return self._take(batch, self._source.end_read_call)

    def _start(self, call: Call) -> None:
        name = f"hostcallback-{self._device_name}-call"
        thread = threading.Thread(target=self._serve, args=([call],), name=name, daemon=True)
        self._note(call, thread)
        try:
            thread.start()
        except RuntimeError as error:  # an interpreter that ends starts no thread
            self._end(call, failed=True)
            self._source.fail(
                call.message.seq, f"hostcallback: no thread could be started for a call: {error}"
            )

    def _serve(self, first: list[Call]) -> None:
        self._answer(first.pop())
        while (batch := self._source.read_call(IDLE_SEC)) is not None:
            call = self._take(batch, self._source.end_read_call)
            if call is not None:
                self._answer(call)
            del batch, call

    def _answer(self, call: Call, interrupts: HeldInterrupts | None = None) -> None:
        seq = call.message.seq
        try:
            replied = self._source.reply(seq, self._run(call, interrupts))
        except CallFailedError as error:
            self._source.fail(seq, str(error))
            return
        except BaseException as error:
            logger.exception("a reply could not be sent")
            self._source.fail(seq, f"hostcallback: the reply to a call could not be sent: {error!r}")
            return
        # The program goes on here, perhaps for long: nothing of the call may stay alive.
        del call
        self._source.resume(replied)


class CallsInPlace(Calls):
    """The calls of programs that hold a thread while they wait: that thread runs the host function."""

    def __init__(self, device_name: str, source: QueueSource, deliver: Callable[[Batch], None]) -> None:
        """See `Calls`."""
        super().__init__(device_name, deliver)
        self._source = source

    def ask(self, prefix: bytes, arrays: Sequence[Array]) -> list[Array]:
        """Emits a call, waits until it is its turn, and runs its host function. By the program's thread.

        Raises:
            CallFailedError: with what the program is to fail with.
        """
        call = self._take(self._source.call(prefix, arrays), self._source.end_read_call)
        if call is None:
            raise CallFailedError(_unknown(decode_header(prefix).consumer_id))
        message = call.message._replace(arrays=[_aligned(array) for array in call.message.arrays])
        return self._run(Call(message, call.scope))

    def _start(self, call: Call) -> None:
        # Read by the receiver thread, because the program's has given up.
        self._note(call, threading.current_thread())
        self._end(call, failed=True)


def _unknown(consumer_id: int) -> str:
    return (
        f"hostcallback: a call is for consumer {consumer_id:#018x}, which this process does not know: its program was "
        "compiled elsewhere"
    )


def _aligned(array: Array) -> Array:
    # XLA:CPU computes on aligned memory in place. Other memory it copies first, above 100 KB on one of the threads that
    # programs hold while they wait for a host function: perhaps all of them.
    if array.nbytes < 1 << 16 or array.ctypes.data % ALIGNMENT == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy: Array = np.ndarray(array.shape, array.dtype, memory.data, start)
    copy[...] = array
    return copy
