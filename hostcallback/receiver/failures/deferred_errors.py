"""Collects the errors that must not stop the stream: tap exceptions, unknown consumers, lost messages."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hostcallback.receiver import errors
from hostcallback.receiver.failures import check_report, explanation, failure_report, steps
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Message, own_step

MAX_KEPT = 100


class OnError(enum.StrEnum):
    """What happens after a failed check or an exception of a tap function. The first of each is always logged at once.

    Example:
        with hcb.outfeed_receiver(on_error=hcb.OnError.WARN):
            train()
    """

    DEFER = "defer"
    """The next barrier, or the receiver's end, raises them."""
    WARN = "warn"
    """They are logged, and never raised."""
    RAISE_SOON = "raise_soon"
    """As DEFER; the next call of a tapped program raises them too."""
    ABORT = "abort"
    """As DEFER; a failed check ends the running program, and all processes of a program of several. Exceptions of tap
    functions are raised as with RAISE_SOON."""
    STOP = "stop"
    """As DEFER; a failed check requests a stop (`hcb.request_stop`), so that loops end and keep what they have."""


class MultipleFailures(BaseExceptionGroup[BaseException]):
    """Raised by a sink that makes several calls per message, if some of them failed. Each failure is counted."""


class DelegatedFailure(BaseException):
    """Raised by a sink that delivers for other consumers: the failure belongs to one of them."""

    def __init__(self, consumer: Consumer, error: BaseException) -> None:
        """`error` is the exception of the consumer's own sink."""
        super().__init__(consumer, error)
        self.consumer = consumer
        self.error = error


class FailureOfProgram(BaseException):
    """Raised by the sink of a call whose failure the program's caller gets, and no barrier."""

    def __init__(self, error: BaseException) -> None:
        """`error` is the exception of the host function."""
        super().__init__(error)
        self.error = error


class DeferredErrors:
    """The errors of delivered messages, with limits, until a thread raises them.

    Any thread. Receiver threads add errors; the thread that leaves a scope or waits at a barrier takes them.

    Attributes:
        on_error: policy for failed checks and exceptions of tap functions.
        max_kept: number of exceptions, and of checks, that are kept whole.
        max_steps: number of steps that are kept of each check.
        unclaimed: called as those of `listen` are, with failures for which none of them returns True. Must not raise.
    """

    def __init__(
        self, max_kept: int = MAX_KEPT, on_error: OnError = OnError.DEFER, *, log_failures: bool = True
    ) -> None:
        """Keeps nothing yet. Exceptions and checks beyond the limit are counted.

        Args:
            max_kept: number of exceptions, and of checks, that are kept whole.
            on_error: policy for failed checks and exceptions of tap functions.
            log_failures: whether exceptions of tap functions are logged here; without it `take` returns them under
                every policy, and its caller logs them.
        """
        self.on_error = on_error
        self.unclaimed: Callable[[check_report.FailedCheck | errors.TapFailure], None] | None = None
        """Called as those of `listen` are, with failures for which none of them returns True. It must not raise."""
        self.on_exception: Callable[[errors.TapFailure], None] | None = None
        """Called with each exception of a tap function. It must not raise."""
        self.step_of: Callable[[Message], int | None] = own_step
        """Returns the step of a message whose check or tap function failed. It must not raise."""
        self.steps_of: steps.StepsOf = lambda failures: {}
        """Returns the steps of failures that other messages show, before they are reported. It must not raise."""
        self.on_steps: Callable[[Mapping[steps.Occurrence, int]], None] | None = None
        """Called with what `steps_of` has found. It must not raise."""
        self.max_kept, self.max_steps = max_kept, steps.MAX_STEPS
        self._lock = threading.RLock()  # protects everything below; signal handlers may wait for taps
        self._found: failure_report.Deferred | None = (
            None  # what no thread has taken; made at the first failure
        )
        self._all_checks = check_report.FailedChecks(max_kept)
        self._looked_for: set[steps.Occurrence] = set()
        self._raised_by_callers = 0
        self._log = failure_report.FailureLog() if log_failures else None

    def _pending(self) -> failure_report.Deferred:
        # The caller holds the lock.
        if self._found is None:
            self._found = failure_report.Deferred(check_report.FailedChecks(self.max_kept, self.max_steps))
        return self._found

    def add_check(
        self, consumer: Consumer, failed: explanation.CheckFailed, device: str, count: int = 1
    ) -> None:
        """Counts a check that failed `count` times, and reports it at once if `on_error` demands that."""
        step = self.step_of(failed.message)
        failure_report.failure_history.add_check(consumer, failed, device, count, step)
        with self._lock:
            group = self._pending().checks.add(consumer, failed, device, count, step=step)
            explained = None if group is None else group.explanation
            self._all_checks.add(consumer, failed, device, count, explained, step)
            is_logged = self._log is not None and not self._raised_by_callers
        if group is not None:
            self._tell(group)
        warns = self.on_error is OnError.WARN
        if warns and group is not None:
            failure_report.warn_of(group)
        if is_logged and self._log is not None:
            self._log.add_check(consumer, device, count, group, warns=warns)
        # Only the first failure of its line: the others are reported with that one.
        if group is not None and self.on_error is OnError.RAISE_SOON:
            self._raise_soon()
        if group is not None and self.on_error is OnError.ABORT:
            for tell in _abort_watchers:
                tell(group)
        if group is not None and self.on_error is OnError.STOP:
            for tell in _stop_watchers:
                tell(group)

    def find_steps(self) -> None:
        """Looks for the steps of failures that no thread has taken, and that came without one."""
        with self._lock:
            unknown = [] if self._found is None else self._found.unknown_steps()
            new = [failure for failure in unknown if failure not in self._looked_for]
            self._looked_for = {*unknown}  # what was taken is not looked for again
        if new and (found := self.steps_of(new)):  # without the lock: it reads files
            with self._lock:
                self._all_checks.set_steps(found)
                if self._found is not None:
                    self._found.set_steps(found)
            failure_report.failure_history.set_steps(found)
            if self.on_steps is not None:
                self.on_steps(found)

    @contextlib.contextmanager
    def raised_by_caller(self) -> Iterator[None]:
        """Within the block, failed checks are not logged: the thread of the block raises or reports them afterwards."""
        with self._lock:
            self._raised_by_callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._raised_by_callers -= 1

    def _tell(self, failure: check_report.FailedCheck | errors.TapFailure) -> None:
        claims = [notice(failure) for notice in _listeners]
        if self.unclaimed is not None and not any(claims):
            self.unclaimed(failure)

    def _raise_soon(self) -> None:
        raise_soon_queue.append(self)
        for tell in _urgent_watchers:
            tell()

    def checks(self) -> list[check_report.FailedCheck]:
        """The failed checks that have not been raised, in the order of their first failures."""
        with self._lock:
            return [] if self._found is None else self._found.checks.groups()

    def all_checks(self) -> list[check_report.FailedCheck]:
        """All failed checks, including those that were raised or only logged."""
        with self._lock:
            return self._all_checks.groups()

    def take_checks(self) -> check_report.FailedChecks:
        """Removes and returns the failed checks."""
        self.find_steps()
        taken = check_report.FailedChecks(self.max_kept)
        with self._lock:
            if self._found is not None:
                taken, self._found.checks = self._found.checks, taken
        self._leave_queue()
        return taken

    def _leave_queue(self) -> None:
        # Not `while self in`: another thread may take the entry between the look and the removal.
        with contextlib.suppress(ValueError):
            while True:
                raise_soon_queue.remove(self)

    def put_back(self, checks: check_report.FailedChecks) -> None:
        """Puts back the result of `take_checks`, before later failures."""
        with self._lock:
            self._pending().checks.merge(checks)

    def add_failure(self, failure: errors.TapFailure) -> None:
        """Keeps the exception of a tap, or counts it if the limit is reached."""
        if isinstance(failure.exception, MultipleFailures):
            for error in failure.exception.exceptions:
                self.add_failure(replace(failure, exception=error))
            return
        if isinstance(failure.exception, DelegatedFailure):
            consumer, error = failure.exception.consumer, failure.exception.error
            self.add_failure(
                replace(
                    failure, exception=error, tap=consumer.name, source_line=consumer.source_line,
                    transforms=consumer.transforms, kwargs=consumer.kwargs,
                )
            )  # fmt: skip
            return
        error = failure.exception
        if isinstance(error, explanation.CheckFailed):
            consumer = Consumer(
                0, failure.tap, failure.source_line, error.sink, failure.transforms, failure.kwargs
            )
            self.add_check(consumer, error, failure.device)
            return
        if isinstance(
            error, errors.BreakpointQuit
        ):  # the user asked for it, and the program's caller gets it
            return
        if isinstance(error, errors.UnboundConsumerError):
            with self._lock:
                self._pending().unbound[str(error)] += 1
            return
        if isinstance(error, errors.IncompleteValueError):
            with self._lock:
                self._pending().incomplete[f"{failure.tap} at {failure.source_line}"] += error.count
            return
        failure = self._note(failure)
        with self._lock:
            # Decided with the lock, so that only one thread reports the first failure; acted on without it,
            # since watchers run code that may come back here.
            found = self._pending()
            first = not found.failures
            if len(found.failures) < self.max_kept:
                failure.exception.add_note(f"raised by {failure.describe()}")
                failure_report.note_batch(failure)
                found.failures.append(failure)
            else:
                found.suppressed[failure.source_line] += 1
        self._tell(failure)
        if first and self.on_error in (OnError.RAISE_SOON, OnError.ABORT):
            self._raise_soon()
        if first:
            for tell in _failure_watchers:
                tell()

    def add_elsewhere(self, error: errors.JobError) -> None:
        """Keeps the failure of another process. The next call of a tapped program raises it, under every policy."""
        with self._lock:
            found = self._pending()
            found.elsewhere = found.elsewhere or error
        self._raise_soon()

    def has_elsewhere(self) -> bool:
        """Whether no thread has taken the failure of `add_elsewhere`."""
        with self._lock:
            return self._found is not None and self._found.elsewhere is not None

    def note_failure(self, failure: errors.TapFailure) -> None:
        """Logs an exception that the program's caller gets, and that no barrier raises."""
        self._tell(self._note(failure))

    def _note(self, failure: errors.TapFailure) -> errors.TapFailure:
        # Returns it with its step, if it is known.
        message, error = failing_message(), failure.exception
        if message is not None:
            failure = replace(failure, time_ns=message.time_ns, step=self.step_of(message))
        error.__traceback__ = failure_report.without_receiver_frames(error.__traceback__)
        if isinstance(
            error, errors.CallResultError | errors.BreakpointError
        ):  # they have no frame of the user's
            error.__traceback__ = None
        failure_report.failure_history.add_exception(failure)
        if self.on_exception is not None:
            self.on_exception(failure)
        # Logging runs user code (handlers), so it must not hold the lock.
        if self._log is not None:
            self._log.add(failure)
        return failure

    def add_unknown(self, consumer_id: int) -> None:
        """Counts a message whose consumer id is not registered."""
        with self._lock:
            self._pending().unknown[consumer_id] += 1

    def add_lost(self, reason: str, count: int) -> None:
        """Counts messages that will never be delivered."""
        with self._lock:
            self._pending().lost[reason] += count

    def take(self, *, ends: bool = True) -> errors.TapFunctionException | None:
        """Removes all collected errors and returns the exception that reports them; None if there are none.

        Args:
            ends: whether this is the last time. What was only warned of stays until then, and is summed up there.
        """
        self.find_steps()
        with self._lock:
            found, self._found = self._found, None
            if found is not None and self.on_error is OnError.WARN and not ends:
                self._found = failure_report.Deferred(found.checks)
                found = replace(found, checks=check_report.FailedChecks(0))
                if self._log is not None:
                    self._found.failures, self._found.suppressed = found.failures, found.suppressed
                    found = replace(found, failures=[], suppressed=Counter())
        self._leave_queue()
        if found is None:
            return None
        if self.on_error is OnError.WARN:
            found = self._without_warned(found)
        return failure_report.report_of(found)

    def peek(self) -> errors.TapFunctionException | None:
        """Returns what `take` would return, without the failed checks, and removes nothing."""
        with self._lock:
            if self._found is None:
                return None
            found = replace(
                self._found, checks=check_report.FailedChecks(0), failures=list(self._found.failures)
            )
        if self.on_error is OnError.WARN and self._log is not None:
            found = replace(found, failures=[], suppressed=Counter())
        return failure_report.report_of(found)

    def forget_told(self, error: BaseException | None) -> None:
        """Removes the failures of calls that `error`, with which the program has ended, reports."""
        text = failure_report.texts_of(error)
        with self._lock:
            if text and self._found is not None:
                self._found.failures = [
                    failure
                    for failure in self._found.failures
                    if not (failure.is_call and told_to_caller(failure) in text)
                ]

    def failed(self) -> int:
        """Number of exceptions of tap functions that no thread has taken."""
        with self._lock:
            return 0 if self._found is None else len(self._found.failures) + self._found.suppressed.total()

    def _without_warned(self, found: failure_report.Deferred) -> failure_report.Deferred:
        if found.checks:
            logger.warning("%s", found.checks.headline())
        if found.failures and self._log is not None:
            logger.warning("%s", failure_report.headline(found.failures, found.suppressed))
            found = replace(found, failures=[], suppressed=Counter())
        return replace(found, checks=check_report.FailedChecks(0))


raise_soon_queue: list[DeferredErrors] = []
"""Objects with failed checks that the next call of a tapped program must raise."""

_urgent_watchers: list[Callable[[], None]] = []


def watch_urgent(tell: Callable[[], None]) -> None:
    """Calls `tell`, on a receiver thread, whenever an object is added to `raise_soon_queue`."""
    _urgent_watchers.append(tell)


_abort_watchers: list[Callable[[check_report.FailedCheck], None]] = []


def watch_aborts(tell: Callable[[check_report.FailedCheck], None]) -> None:
    """Calls `tell`, on a receiver thread, with the first failure of a check under `OnError.ABORT`."""
    _abort_watchers.append(tell)


_stop_watchers: list[Callable[[check_report.FailedCheck], None]] = []


def watch_stops(tell: Callable[[check_report.FailedCheck], None]) -> None:
    """Calls `tell`, on a receiver thread, with the first failure of a check under `OnError.STOP`."""
    _stop_watchers.append(tell)


Notice = Callable[[check_report.FailedCheck | errors.TapFailure], bool | None]
"""Gets a failure; returns whether it belongs to the listener."""

_listeners_lock = threading.RLock()  # a finalizer, which may run anywhere, calls `ignore`
_listeners: tuple[Notice, ...] = ()


def listen(notice: Notice) -> None:
    """Calls `notice` with each exception of a tap function, and with the first failure of each check. Receiver threads.

    The call is in the thread that delivered the message, before the device's next message is delivered.
    `failing_message` returns the message.
    """
    global _listeners
    with _listeners_lock:
        _listeners += (notice,)


class _Here(threading.local):
    message: Message | None = None


_here = _Here()


def failure_of(error: BaseException, message: Message, device: str) -> errors.TapFailure:
    """The failure of a message's sink, on the device of that name."""
    consumer = message.consumer
    return errors.TapFailure(
        error, consumer.name, consumer.source_line, device, message.seq, consumer.transforms, consumer.kwargs,
        message.run_id,
    )  # fmt: skip


def told_to_caller(failure: errors.TapFailure) -> str:
    """The first line of the error with which the program of a call fails. Different for each failure of a process."""
    return f"hostcallback: a call failed: {failure.describe()}\n"


@contextlib.contextmanager
def about(message: Message) -> Iterator[None]:
    """In the block, `failing_message` returns that message. The calling thread."""
    _here.message = message
    try:
        yield
    finally:
        _here.message = None


def failing_message() -> Message | None:
    """The message of the failure that a listener is being told of; None if it is not known."""
    return _here.message


def ignore(notice: Notice) -> None:
    """Ends `listen`."""
    global _listeners
    with _listeners_lock:
        _listeners = tuple(other for other in _listeners if other is not notice)


_failure_watchers: list[Callable[[], None]] = []


def watch_failures(tell: Callable[[], None]) -> None:
    """Calls `tell`, on a receiver thread, after the first exception of a tap function that a thread has to take."""
    _failure_watchers.append(tell)
