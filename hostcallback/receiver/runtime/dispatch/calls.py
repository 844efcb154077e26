"""Runs the host functions of one device's calls and sends their results to the waiting programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from hostcallback.receiver.errors import CallFailedError
from hostcallback.receiver.failures.deferred_errors import FailureOfProgram, about, failure_of, told_to_caller
from hostcallback.receiver.log import logger, traceback_text
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.runtime.dispatch.gil_share import HeldInterrupts
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.wire.array_types import ALIGNMENT, Array
from hostcallback.receiver.wire.frame import Flags, decode_header

IDLE_SEC = 10.0
"""Seconds without a call after which a thread that runs host functions ends."""

LOOK_SEC = 0.05
"""Seconds between the checks for an interrupt of a thread that waits for its call's turn."""

_INTERRUPTED = "hostcallback: a call was interrupted (KeyboardInterrupt) before its host function ran"


class Call(NamedTuple):
    """A message whose reply a program waits for, and the scope that counts it."""

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
        dispatched: whether it runs a host function for a program that it has dispatched and that runs on it.
        interrupts: of the call that it makes for such a program; None if it makes none.
    """

    dispatched = False
    interrupts: HeldInterrupts | None = None


this_thread = _ThisThread()


class ThreadFor(threading.Thread):
    """A thread that runs a host function for its creator, which waits for it."""

    def __init__(self, target: Callable[[], None]) -> None:
        """Runs `target`, which must not raise."""
        self.waiting = threading.current_thread()
        super().__init__(target=target, name=self.waiting.name, daemon=True)


class Calls:
    """Base of all kinds of calls: tracks the running ones and handles their errors.

    A host function never runs on the device's receiver thread, which goes on. So the host function may run programs
    with taps and calls itself. The delivering thread calls `start` and `refuse`; any thread may call the rest.

    Attributes:
        running: by sequence number, the calls whose host functions run. Other threads read copies of it without a lock.
    """

    def __init__(self, device_name: str, deliver: Callable[[Batch], None]) -> None:
        """Makes the calls of one device.

        Args:
            device_name: name of the device in reports.
            deliver: delivers a batch that was read; for a call it ends in `start`.
        """
        self._device_name = device_name
        self._deliver = deliver
        # Set while a call's thread delivers a call that it will run itself. Needs no lock: the source grants
        # one thread at a time the turn to deliver (the reader, or a thread between its read and
        # `end_read_call`), and only that thread reads or sets this.
        self._taken: list[Call] | None = None
        self._changed = threading.Condition()  # protects everything below
        self.running: dict[int, _Running] = {}
        self._waiters = 0

    def start(self, message: Message, scope: Scope) -> None:
        """Starts the message's sink, whose results are the reply. Does not wait for them.

        An error of the sink fails the waiting program and is deferred in `scope`, which stays open until then.
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

    def fail_unread(self, batch: Batch, reason: str) -> None:
        """Fails the programs that wait for the replies to messages of a batch that cannot be decoded."""

    def longest(self) -> tuple[Consumer, float] | None:
        """Returns the consumer whose host function has run for longest, and its seconds; None if none runs."""
        # A copy, because other threads start and end calls meanwhile; without the lock, because a signal handler may
        # call this while its thread holds it.
        first = min(list(self.running.values()), key=lambda running: running.since, default=None)
        return None if first is None else (first.consumer, perf_counter() - first.since)

    def running_on(self, thread: threading.Thread) -> Consumer | None:
        """Returns the consumer whose host function runs on that thread, or for it on a `ThreadFor`; else None."""
        while isinstance(thread, ThreadFor):
            thread = thread.waiting
        return next((r.consumer for r in list(self.running.values()) if r.thread is thread), None)

    def wait(self, calls: Collection[int], timeout_sec: float) -> bool:
        """Waits until the host functions of these calls have returned. Returns False after `timeout_sec`."""
        with self._changed:
            self._waiters += 1
            try:
                return self._changed.wait_for(lambda: self.running.keys().isdisjoint(calls), timeout_sec)
            finally:
                self._waiters -= 1

    def _start(self, call: Call) -> None:
        """Runs a call that the receiver thread has read."""
        raise NotImplementedError

    def _take(self, batch: Batch, end: Callable[[], None]) -> Call | None:
        # Delivers a call that this thread has read. Returns None if it has no consumer or cannot be decoded.
        # The turn is this thread's until `end()`. `_taken` is reset before that, so that the next thread
        # finds it unset; the caller runs the host function after it, so that a slow one does not stop the
        # stream.
        taken: list[Call] = []
        self._taken = taken
        try:
            self._deliver(batch)
        finally:
            self._taken = None
            end()
        return taken.pop() if taken else None

    def _run(self, call: Call, interrupts: HeldInterrupts | None = None) -> list[Array]:
        """Runs the host function and lets `interrupts` pass during it.

        Raises:
            CallFailedError: the host function raised. The failure is counted, and deferred unless it is a
                `FailureOfProgram`.
        """
        consumer = call.message.consumer
        try:
            if interrupts is None:
                results: list[Array] = consumer.sink(call.message)
            else:
                try:
                    interrupts.allow()
                    results = consumer.sink(call.message)
                finally:
                    interrupts.hold()
        except BaseException as raised:  # any exception fails the waiting program, not this thread
            error = raised.error if isinstance(raised, FailureOfProgram) else raised
            if interrupts is not None:
                interrupts.note(error)
            failure = replace(failure_of(error, call.message, self._device_name), is_call=True)
            with about(call.message):
                if error is raised:
                    call.scope.deferred.add_failure(failure)
                else:
                    call.scope.deferred.note_failure(failure)
            told = traceback_text(error)
            self._end(call, failed=True)
            raise CallFailedError(f"{told_to_caller(failure)}{told}") from None
        # Counts before it replies, so that a thread that has waited for the program finds the counts complete.
        self._end(call, failed=False)
        return results

    def _note(self, call: Call, thread: threading.Thread) -> None:
        running = _Running(call.message.consumer, thread, perf_counter())
        with self._changed:
            self.running[call.message.seq] = running

    def _end(self, call: Call, *, failed: bool) -> None:
        with self._changed:
            running = self.running.pop(call.message.seq)
            if self._waiters:
                self._changed.notify_all()
        call.scope.call_ended(self._device_name, perf_counter() - running.since, failed=failed)


class CallThreads(Calls):
    """The calls of programs that call through a ring.

    If a program runs on a Python thread, such as the one that dispatched it, that thread runs the host function.
    If it runs on a thread of XLA, the program releases that thread and waits. Daemon threads, as many as there are
    simultaneous calls, run the host functions. The program continues on the daemon thread, which is a Python thread,
    so calls in a loop change threads once.
    """

    def __init__(self, device_name: str, source: RingSource, deliver: Callable[[Batch], None]) -> None:
        """See `Calls`."""
        super().__init__(device_name, deliver)
        self._source = source
        source.call_on_own_threads(self._call_here)

    def refuse(self, seq: int, consumer_id: int) -> None:
        """See `Calls`."""
        self._source.fail(seq, _unknown(consumer_id))

    def fail_unread(self, batch: Batch, reason: str) -> None:
        """See `Calls`."""
        for memory, offset, _ in batch.frames:
            header = decode_header(memory, offset)
            if header.flags & Flags.CALL:
                self._source.fail(header.seq, reason)

    def _call_here(self, own: int, resumed: bool, interrupted: bool) -> bool:
        # Runs the host function for a program that runs on this thread and has emitted the call `own`. An interrupt
        # would leave the state half updated, so it is delayed until the program has left the thread. A handler of the
        # user's, which may want the program to go on, is called at once.
        try:
            interrupts = HeldInterrupts()
        except KeyboardInterrupt:
            return True
        if interrupted and interrupts.are_of_python:
            interrupts.end()
            return True
        interrupts.noted |= interrupted
        # Restored below, not reset: the host function may run a program whose call nests in this one.
        before = this_thread.dispatched, this_thread.interrupts
        this_thread.dispatched, this_thread.interrupts = not resumed, interrupts
        try:
            call = self._take_own(own, interrupts)
            if call is not None:
                self._answer(call, interrupts)
        # XLA called this function: an exception would be printed and lost, and the program would
        # get no reply.
        except BaseException as error:
            if not isinstance(error, CallFailedError):
                logger.exception("a call could not be made")
            self._source.withdraw_own_call(own, str(error))
        this_thread.dispatched, this_thread.interrupts = before
        try:
            interrupts.end()
        except KeyboardInterrupt:
            return True
        return interrupts.noted

    def _take_own(self, own: int, interrupts: HeldInterrupts) -> Call | None:
        while (batch := self._source.read_own_call(own, LOOK_SEC)) is None:
            if self._source.own_call_ended(own):
                return None
            if interrupts.noted and not interrupts.are_of_python:
                interrupts.allow()  # calls the user's handler
                interrupts.hold()
            elif interrupts.noted and self._source.withdraw_own_call(own, _INTERRUPTED):
                return None
        return self._take(batch, self._source.end_read_call)

    def _start(self, call: Call) -> None:
        name = f"hostcallback-{self._device_name}-call"
        thread = threading.Thread(target=self._serve, args=([call],), name=name, daemon=True)
        self._note(call, thread)
        try:
            thread.start()
        except RuntimeError as error:  # Python starts no threads while the interpreter shuts down
            self._end(call, failed=True)
            self._source.fail(
                call.message.seq, f"hostcallback: no thread could be started for a call: {error}"
            )

    def _serve(self, first: list[Call]) -> None:
        taken = first
        while True:
            if taken:
                self._answer(taken.pop())  # not kept here: the program may continue on this thread for long
            batch = self._source.read_call(IDLE_SEC)
            if batch is None:
                return
            call = self._take(batch, self._source.end_read_call)
            taken = [] if call is None else [call]
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
        # The program continues on this thread, perhaps for long, so no object of the call may stay alive.
        del call
        self._source.resume(replied, is_own=interrupts is not None)


class CallsInPlace(Calls):
    """The calls of programs that hold a thread while they wait. That thread runs the host function."""

    def __init__(self, device_name: str, source: QueueSource, deliver: Callable[[Batch], None]) -> None:
        """See `Calls`."""
        super().__init__(device_name, deliver)
        self._source = source

    def ask(self, prefix: bytes, arrays: Sequence[Array]) -> list[Array]:
        """Emits a call, waits for its turn and runs its host function. Called on the program's thread.

        Raises:
            CallFailedError: has the message with which the program fails.
        """
        call = self._take(self._source.call(prefix, arrays), self._source.end_read_call)
        if call is None:
            raise CallFailedError(_unknown(decode_header(prefix).consumer_id))
        message = call.message._replace(arrays=[_aligned(array) for array in call.message.arrays])
        return self._run(Call(message, call.scope))

    def _start(self, call: Call) -> None:
        # The receiver thread reads a call only after the program's thread has given up.
        self._note(call, threading.current_thread())
        self._end(call, failed=True)


def _unknown(consumer_id: int) -> str:
    return (
        f"hostcallback: a call is for consumer {consumer_id:#018x}, which this process does not know: its program was "
        "compiled elsewhere"
    )


def _aligned(array: Array) -> Array:
    # XLA:CPU computes on aligned memory in place and copies other memory first. Above 100 KB it copies on one of the
    # threads that programs hold while they wait for a host function. If they hold all of them, it never copies.
    if array.nbytes < 1 << 16 or array.ctypes.data % ALIGNMENT == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy: Array = np.ndarray(array.shape, array.dtype, memory.data, start)
    copy[...] = array
    return copy
