"""The exceptions that the runtime raises, and the tree they form.

HostCallbackError
|-- DeviceClaimedError       a second receiver on a device that has one
|-- ReentrantWaitError       a tap function waited for the taps it is one of
|-- TapTimeoutError          (also a TimeoutError) a tap or a computation outlasted the limit
|-- UnknownConsumerError     messages for consumers that this process does not have
|   `-- UnboundConsumerError of an exported program's taps
|-- LostMessagesError        messages that a policy dropped or a damaged stream lost
|   `-- IncompleteValueError shards of an array that is partitioned over devices
|-- CallFailedError          a call's host function raised, or the call will get no reply
|-- CallResultError          (also a TypeError) the result of a host function differs from the announced one
|-- BreakpointError          a breakpoint stopped without a console for commands
|-- BreakpointQuit           the user ended the program at a breakpoint
|-- JobError                 another process of the program failed
|-- check_report.CheckError (also an AssertionError) a check failed on a device
|   `-- sinks.nonfinite.NonFiniteError (also an ArithmeticError) a watched operation made NaN or infinite values
|-- WireError                a frame cannot be decoded
|   |-- TruncatedFrameError     it continues beyond the end of the buffer
|   |-- CorruptFrameError       its bytes contradict the format or each other
|   |-- UnsupportedVersionError its writer was newer
|   |-- UnsupportedDtypeError   it has a dtype that this installation lacks
|   `-- CorruptStreamError      a stretch of a stream holds no frames
|-- TapLogError              a log cannot be read or written
|   |-- NotATapLogError         a file or folder is not a tap log
|   |   `-- CutOffLogError      a file ends before a segment's header does
|   |-- NoSuchRunError          a log has no run of that name
|   `-- DamagedLogError         a log was read, except for its damaged parts
|-- RemoteError              forwarding and collecting
|   |-- TransportError          the collector cannot be reached, or the connection broke: the process retries
|   |   `-- StreamRefusedError  the collector refuses this stream: another try soon does not help
|   |-- BadStreamError          a client sends bytes that are not a stream of a tap log
|   |   `-- GapError            the bytes between the stored ones and the next are missing
|   `-- SpoolError              a spool's folder cannot be used
`-- NativeLibraryError       the native transport was asked for and cannot be loaded
TapFunctionException         an ExceptionGroup of everything that was deferred
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


class HostCallbackError(Exception):
    """Base of the runtime's own exceptions.

    Example:
        try:
            receiver.LogReader(".")
        except hcb.HostCallbackError as error:  # of any kind
            print(error)
    """


class DeviceClaimedError(HostCallbackError, RuntimeError):
    """A receiver was opened on a device that belongs to another open receiver.

    Example:
        try:
            with hcb.outfeed_receiver(), hcb.outfeed_receiver():
                train()
        except hcb.DeviceClaimedError as error:
            print(error)
    """


class ReentrantWaitError(HostCallbackError, RuntimeError):
    """A tap function called something that waits for tap functions to finish.

    Example:
        x = hcb.tap(lambda value: hcb.barrier_wait(), x)
        try:
            hcb.barrier_wait()
        except* hcb.ReentrantWaitError as group:
            print(group.exceptions)
    """


class TapTimeoutError(HostCallbackError, TimeoutError):
    """A tap function or a device computation outlasted the given limit.

    Example:
        try:
            hcb.barrier_wait(timeout_sec=0.5)
        except hcb.TapTimeoutError as error:
            print(error)
    """


class UnknownConsumerError(HostCallbackError, LookupError):
    """Messages arrived whose consumer id this process has not registered.

    Example:
        try:
            hcb.barrier_wait()
        except* hcb.UnknownConsumerError as group:
            print(group.exceptions)
    """


class UnboundConsumerError(UnknownConsumerError):
    """An exported program's tap sent messages, and nothing in this process is bound to its name.

    Example:
        try:
            hcb.barrier_wait()
        except* hcb.UnboundConsumerError as group:
            print(group.exceptions)
    """


class LostMessagesError(HostCallbackError):
    """Messages were dropped by a back-pressure policy, or lost in a damaged stream.

    Example:
        try:
            hcb.barrier_wait()
        except* hcb.LostMessagesError as group:
            print(group.exceptions)
    """


class IncompleteValueError(LostMessagesError):
    """Shards of values never came: a back-pressure policy dropped them, or their device failed.

    Attributes:
        count: number of incomplete values.

    Example:
        try:
            hcb.barrier_wait()
        except* hcb.IncompleteValueError as group:
            print(group.exceptions[0].count)
    """

    def __init__(self, message: str, count: int = 1) -> None:
        """Makes the error of `count` incomplete values."""
        super().__init__(message)
        self.count = count


class CallFailedError(HostCallbackError, RuntimeError):
    """A program's call to the host failed. XLA ends the program with this message; users never see this type."""


class CallResultError(HostCallbackError, TypeError):
    """The result of a call's host function differs from its `result_shape`.

    Example:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the program's
            hcb.call(lambda a: a[:1], x, result_shape=x)
        try:
            hcb.barrier_wait()
        except* hcb.CallResultError as group:
            print(group.exceptions)
    """


class BreakpointError(HostCallbackError, RuntimeError):
    """A breakpoint stopped and cannot read commands, because the standard input is not a terminal.

    Example:
        try:
            hcb.breakpoint()
        except hcb.BreakpointError as error:  # the standard input is not a terminal
            print(error)
    """


class BreakpointQuit(HostCallbackError):
    """The user ended a program that waited at a breakpoint.

    Example:
        try:
            hcb.breakpoint(stdin=io.StringIO("q\\n"))
        except hcb.BreakpointQuit as error:
            print(error)
    """


class JobError(HostCallbackError, RuntimeError):
    """Another process of the program (`jax.distributed`) failed first, and so this one ends, too.

    Attributes:
        process: its index, as `jax.process_index()` is there.
        source_line: the user's line that failed there: `file:line (function)`.

    Example:
        try:
            with hcb.outfeed_receiver(on_error="abort"):
                train()
        except* hcb.JobError as group:
            print(group.exceptions[0].process, group.exceptions[0].source_line)
    """

    def __init__(self, process: int, source_line: str, text: str) -> None:
        """`text` is the report of the process that failed."""
        super().__init__(f"process {process} of this program failed, at {source_line}: {text}")
        self.process = process
        self.source_line = source_line
        self._text = text

    def __reduce__(self) -> tuple[type[JobError], tuple[int, str, str]]:
        """For pickle, which would call the class with the whole text."""
        return JobError, (self.process, self.source_line, self._text)


class NativeLibraryError(HostCallbackError, ImportError):
    """The native library is missing, or its version differs from this package's.

    Example:
        try:
            train()
        except hcb.NativeLibraryError as error:  # with HOSTCALLBACK_TRANSPORT=native
            print(error)
    """


@dataclass(frozen=True, slots=True)
class TapFailure:
    """One exception of one tap invocation, with its origin.

    Attributes:
        exception: the exception of the tap function, with its original traceback.
        tap: the tap function's name.
        source_line: `file:line (function)` of the user's tap call at trace time.
        device: the device that emitted the message, as text, such as `cpu:0`.
        seq: the message's sequence number on that device.
        transforms: the transformations applied to the tap, in the format that tap functions get.
        kwargs: the tap's keyword arguments.
        run_id: the launch of the program, equal on all its devices; 0 on the callback transport.
        is_call: whether the program waited for a result, as with `hcb.call`, and failed with this exception.
        time_ns: Unix time of the message, in nanoseconds.
        step: of the message: its own, or that which the receiver's log shows; None if it is not known.

    Example:
        hcb.tap(lambda value: 1 / 0, x, name="loss")
        try:
            hcb.barrier_wait()
        except hcb.TapFunctionException as group:
            print(group.failures[0].tap, group.failures[0].source_line)
    """

    exception: BaseException
    tap: str
    source_line: str
    device: str
    seq: int
    transforms: tuple[tuple[str, dict[str, Any]], ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    run_id: int = 0
    is_call: bool = False
    time_ns: int = 0
    step: int | None = None

    def __getstate__(self) -> list[Any]:
        """For pickle: keyword arguments that cannot be pickled, such as lambdas, become texts."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state["kwargs"] = {name: _portable(value) for name, value in self.kwargs.items()}
        return [*state.values()]

    def describe(self) -> str:
        """Returns one line with the tap, its source line, device, sequence number, transforms and kwargs."""
        text = f"tap {self.tap} at {self.source_line}, device {self.device}, message {self.seq}"
        if self.transforms:
            text += ", transforms " + ", ".join(
                f"{name} {params}" if params else name for name, params in self.transforms
            )
        if self.kwargs:
            text += ", kwargs " + ", ".join(f"{k}={v!r}" for k, v in sorted(self.kwargs.items()))
        return text


def _portable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # each class raises its own
        return repr(value)
    return value


class TapFunctionException(ExceptionGroup[Exception]):
    """All exceptions of tap functions since the last report, raised together.

    The group holds the original exceptions (so `except*` selects them by type), each with its traceback and a note
    naming the tap. If a line raised more than five exceptions, those of one type whose texts differ in numbers only are
    one member of the group, with a note that counts them; `failures` has the others too.

    Attributes:
        failures: one `TapFailure` per kept exception (`max_errors` of them), in order of delivery.
        suppressed: number of further exceptions beyond the limit, by the tap's source line.

    Example:
        hcb.tap(lambda value: 1 / 0, x, name="loss")
        try:
            hcb.barrier_wait()
        except hcb.TapFunctionException as group:
            print(group, len(group.failures))
    """

    failures: tuple[TapFailure, ...]
    suppressed: Mapping[str, int]

    def __new__(
        cls,
        message: str,
        exceptions: Sequence[Exception],
        failures: Sequence[TapFailure] = (),
        suppressed: Mapping[str, int] | None = None,
    ) -> TapFunctionException:
        """Makes the group; `exceptions` must not be empty."""
        self = super().__new__(cls, message, exceptions)
        self.failures = tuple(failures)
        self.suppressed = dict(suppressed or {})
        return self

    def __init__(
        self,
        message: str,
        exceptions: Sequence[Exception],
        failures: Sequence[TapFailure] = (),
        suppressed: Mapping[str, int] | None = None,
    ) -> None:
        """Initializes the group. `__new__` sets the attributes, because ExceptionGroup makes groups there."""
        super().__init__(message, exceptions)

    def derive(self, excs: Sequence[Exception], /) -> TapFunctionException:  # type: ignore[override]
        """Returns a group of the same kind with `excs` (used by `split`, `subgroup` and `except*`)."""
        ids = {id(error) for error in excs} | {id(error.__cause__) for error in excs}
        kinds = {_kind(failure) for failure in self.failures if id(failure.exception) in ids}
        kept = [failure for failure in self.failures if _kind(failure) in kinds]
        return TapFunctionException(self.message, excs, kept, self.suppressed)


def _kind(failure: TapFailure) -> tuple[str, type[BaseException]]:
    return failure.source_line, type(failure.exception)


class WireError(HostCallbackError):
    """A frame cannot be decoded. Only subclasses are raised."""


class TruncatedFrameError(WireError):
    """The frame continues beyond the end of the buffer."""


class CorruptFrameError(WireError):
    """The bytes contradict the format or each other."""


class UnsupportedVersionError(WireError):
    """The frame is of a newer wire format than this package reads."""


class UnsupportedDtypeError(WireError):
    """The frame contains an array of a dtype that this installation does not have."""


class CorruptStreamError(WireError):
    """A stretch of a stream holds no frames; the stream continues after it.

    Attributes:
        skipped: number of messages in that stretch.
    """

    def __init__(self, message: str, skipped: int = 0) -> None:
        """`skipped` is the number of lost messages."""
        super().__init__(message)
        self.skipped = skipped


class RemoteError(HostCallbackError):
    """An error between a process and its collector."""


class TransportError(RemoteError):
    """The collector cannot be reached, or the connection broke."""


class StreamRefusedError(TransportError):
    """The collector refuses this stream; another try soon does not help."""


class BadStreamError(RemoteError):
    """A client sends bytes that are not a stream of a tap log."""


class GapError(BadStreamError):
    """Bytes are missing between the stored part of a stream and its next slice."""


class SpoolError(RemoteError):
    """The folder of a spool cannot be used."""


class TapLogError(HostCallbackError):
    """A tap log cannot be read or written."""


class NotATapLogError(TapLogError):
    """A file is not a segment of a tap log, or a folder has none."""


class CutOffLogError(NotATapLogError):
    """A file ends before a segment's header does: its writer was killed at that moment, or the file was truncated."""


class NoSuchRunError(TapLogError):
    """A log has no run of the wanted name."""


class DamagedLogError(TapLogError):
    """Parts of a log are damaged. The intact parts have been read."""
