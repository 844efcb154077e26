"""`outfeed_receiver`: counts and reports the taps of a part of the program, such as a loop."""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import jax

from hostcallback.api import receiver_options
from hostcallback.api.barrier import in_traced_code, wait_for_taps
from hostcallback.api.receiver_options import ReceiverSink, ReceiverSinks, RecordTo
from hostcallback.lifecycle import receivers as transport, wait_bounds
from hostcallback.lifecycle.job import job_id, process_index, this_job
from hostcallback.primitives import effect_dispatch
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.failures.check_report import FailedCheck, has_only_checks_of
from hostcallback.receiver.failures.deferred_errors import MAX_KEPT, OnError
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Sink
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.dispatch.scope import Scope, ScopeSinks, never_entered, tell_never_entered
from hostcallback.receiver.runtime.knobs import knobs
from hostcallback.receiver.runtime.rules.rule_table import RuleNotes
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.runtime.signals import watch_termination
from hostcallback.receiver.runtime.stats import ShownAsSummary, StatsRows, summarize
from hostcallback.receiver.sinks.metric_writers.sink import WriterStats
from hostcallback.receiver.sinks.times import new_tables, times_by_tap
from hostcallback.receiver.sources.back_pressure import BackPressure, Policy
from hostcallback.receiver.taplog.writing.recorder import Recorder, record as record_to
from hostcallback.sync import inflight
from hostcallback.tracing.source_line import hide_frames, public, user_source_line, user_stacklevel

DRAIN_SEC = 0.3
"""Seconds that the collector and the writers of metrics have after an interrupt. The rest stays in the spool."""


class OutfeedReceiver(ShownAsSummary):
    """A receiver of the taps of a part of the program; made by `outfeed_receiver`.

    Its properties may be read on any thread, while it is open and after.

    Example:
        with hcb.outfeed_receiver(receiver_name="training") as rx:
            train()
        print(rx.summary())
    """

    def __init__(
        self,
        scope: Scope,
        devices: Sequence[jax.Device],
        timeout_sec: float,
        sinks: ReceiverSinks,
        flight_recorder: str | os.PathLike[str] | None,
    ) -> None:
        """Makes the receiver; see `outfeed_receiver`."""
        self._forward = sinks.forward
        self._forwarder: Forwarder | None = None
        self._rule_notes: list[RuleNotes] = []
        self._timeout_sec = timeout_sec
        self._record = sinks.record
        self._batches = sinks.batches
        self._metrics = sinks.metrics
        messages: list[Sink] = [*sinks.messages, *([] if sinks.metrics is None else [sinks.metrics])]
        if messages:
            scope.deliver_to(ScopeSinks(messages))
        scope.metrics = sinks.metrics
        self._flight_recorder = flight_recorder
        self._scope = scope
        self._devices = tuple(devices)
        never_entered[scope] = "outfeed_receiver", scope.made_at
        self._names = [transport.device_name(device) for device in devices]
        self._ids = [device.id for device in devices]

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Logs that the receiver was never entered."""
        if not _is_finalizing():  # kept here: the names of the module may be gone by then
            tell_never_entered([scope for scope in [getattr(self, "_scope", None)] if scope is not None])

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices whose taps this receiver counts and reports."""
        return self._devices

    @property
    def stats(self) -> StatsRows:
        """A snapshot of the statistics so far, one row per device; its `times` are those of `what="time"`."""
        return StatsRows(runtime.stats(self._scope))

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, while the receiver is open and after; None if it does not record."""
        return self._scope.recorder

    @property
    def forwarder(self) -> Forwarder | None:
        """The forwarder of the messages, while the receiver is open and after; None if it does not forward."""
        return self._forwarder

    @property
    def writers(self) -> list[WriterStats]:
        """Counts of written and lost metric records, per writer of `writers=`, while the receiver is open and after."""
        return [] if self._metrics is None else self._metrics.stats

    @property
    def failed_checks(self) -> list[FailedCheck]:
        """The failed checks since the receiver was opened, raised or not, by line, the first failure first."""
        return self._scope.deferred.all_checks()

    def summary(self) -> str:
        """Returns the statistics as text tables: messages, bytes, rate, drops, failures and time per device; places."""
        found = list(times_by_tap.values())
        for times in found:
            times.find_steps(self._scope.deferred.steps_of)
        return "\n".join([summarize(self._scope.name, self.stats), *(times.text() for times in found)])

    @hide_frames
    def __enter__(self) -> Self:
        """Waits for earlier computations on the devices, then takes the devices over from the default receiver.

        Raises:
            DeviceClaimedError: another open receiver has one of the devices.
            OSError: the log or the flight recorder's folder cannot be made.
            HostCallbackError: the spool cannot be made, or a file is not a certificate or key.
        """
        never_entered.pop(self._scope, None)
        if in_traced_code():
            logger.warning(
                "the outfeed_receiver at %s is entered in traced code: it is open while the program is traced, and not "
                "when the program runs. Enter it outside of jit, around the call of the program",
                user_source_line(),
            )
        self._wait_for_earlier_work()
        if self._flight_recorder is not None:
            runtime.record_flight(self._flight_recorder)
        try:
            self._open_outputs()
            runtime.claim(self._names, self._scope)
        except BaseException:
            self._close_outputs()
            raise
        try:
            for platform in {device.platform for device in self._devices}:
                transport.start(platform)
        except BaseException:
            runtime.release(self._names, self._scope)
            self._close_outputs()
            raise
        if self._scope.deferred.on_error is OnError.ABORT:
            runtime.rule_table.abort_on_check(self._ids, True)
            this_job.start(aborts=True)
        self._rule_notes = runtime.note_rules(self._scope.recorder, self._forwarder)
        if self._rule_notes:
            knobs.note_values()
        return self

    def _open_outputs(self) -> None:
        self._scope.batch_sinks = self._batches  # without those of an earlier block
        if self._record is not None and not isinstance(self._record, Recorder):
            self._scope.record_with(record_to(self._record, process_index=process_index(), job=job_id()))
        elif self._record is not None:
            self._scope.record_with(self._record)
        if self._scope.recorder is not None:
            watch_termination.add(self._scope.recorder)
        if self._metrics is not None:
            self._metrics.open()
            watch_termination.add(self._metrics)
        if self._forward is not None:
            self._forwarder = receiver_options.open_forwarder(self._forward)
            self._scope.add_batch_sink(self._forwarder)

    def _close_outputs(self) -> None:
        self._end_recording(None)
        if self._forwarder is not None:
            self._forwarder.close()
        self._close_writers(None)

    @hide_frames
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Waits for the taps, sends END_OF_STREAM frames, drains the queues, and raises the deferred errors."""
        if error is not None and wait_bounds.is_interrupt(error):
            self._leave_interrupted(error)
            return
        # After an exception the user waits for a prompt, so the whole wait is limited, not only stalled taps.
        deadline = None if error is None else perf_counter() + self._timeout_sec
        problem: TapTimeoutError | None = None
        finished = False
        try:
            self._wait(deadline)
            runtime.wait_closed(self._names, self._scope, self._timeout_sec)
            finished = True
        except TapTimeoutError as timeout:
            problem = timeout
            runtime.default_scope.takes_rest = True
        finally:
            if not finished:  # also after an interrupt: the next report has the later errors of the taps
                runtime.defer_report(self._scope)
            self._end_recording(problem)
            timeout_sec = self._seconds_for_writers(finished, error or problem)
            for text in self._close_writers(timeout_sec, self._timeout_sec):
                warnings.warn(text, receiver_options.MetricsWarning, stacklevel=user_stacklevel())
            if self._forwarder is not None:
                for text in receiver_options.end_forwarding(self._forwarder):
                    warnings.warn(text, receiver_options.ForwardingWarning, stacklevel=user_stacklevel())
            transport.record_receiver(self._scope.name, self.stats)
            for text in new_tables(None, self._scope.deferred.steps_of) if times_by_tap else ():
                print(text)
        self._scope.deferred.forget_told(error)
        deferred = self._scope.deferred.take()
        if problem is not None and deferred is not None:
            deferred.add_note(str(problem))
        report = deferred or problem
        if report is None:
            return
        if error is None:
            raise report
        if deferred is not None and self._ended_program(error):
            raise deferred from error
        # The exception of the block goes on. The errors of the taps are attached to it and logged.
        error.add_note(f"meanwhile in the receiver: {report}")
        if deferred is None or not has_only_checks_of(deferred, error):
            text = textwrap.dedent("".join(traceback.format_exception(report)))
            logger.error("while the receiver was closing:\n%s", text.rstrip("\n"))

    def _close_writers(self, timeout_sec: float | None, idle_sec: float = math.inf) -> list[str]:
        # Returns a sentence per writer that lost something.
        if self._metrics is None:
            return []
        try:
            return self._metrics.close(timeout_sec, idle_sec)
        finally:  # not before: SIGTERM may come while they are being closed
            watch_termination.remove(self._metrics)

    def _seconds_for_writers(self, finished: bool, error: BaseException | None) -> float | None:
        # As for taps: the whole wait is limited only after an exception, and short after Ctrl-C in the wait for taps.
        if error is not None:
            return self._timeout_sec
        return None if finished else DRAIN_SEC

    def _ended_program(self, error: BaseException) -> bool:
        # JAX's error does not have the check that ended its program, here or in another process; the report has it.
        return self._scope.deferred.on_error is OnError.ABORT and (
            transport.ENDED_BY_CHECK in str(error) or (this_job.failure is not None and _is_of_program(error))
        )

    def _wait(self, deadline: float | None, interrupted: wait_bounds.InterruptedWait | None = None) -> None:
        try:
            wait_for_taps(self._names, deadline=deadline, stall_sec=self._timeout_sec)
        finally:
            if interrupted is not None:
                interrupted.note_backlog()
            runtime.release(self._names, self._scope)
            if self._scope.deferred.on_error is OnError.ABORT:
                runtime.rule_table.abort_on_check(self._ids, False)

    def _leave_interrupted(self, error: BaseException) -> None:
        # The interrupt goes on. One line before its traceback says what was not delivered, recorded or forwarded.
        wait = wait_bounds.InterruptedWait(min(wait_bounds.GRACE_SEC, self._timeout_sec))
        problem: TapTimeoutError | None = None
        found: list[str] = []
        runtime.default_scope.takes_rest = True
        try:
            self._wait(wait.deadline, wait)
        except TapTimeoutError as timeout:
            problem = timeout
        except KeyboardInterrupt:
            wait.end()
        if wait.backlog:
            problem = problem or TapTimeoutError(f"interrupted. {wait.backlog}")
            found.append(f"not delivered: {wait.backlog}")
        runtime.defer_report(self._scope)
        try:
            self._end_recording(problem)
            found += self._close_writers(DRAIN_SEC)
            if self._forwarder is not None:
                found += receiver_options.end_forwarding(self._forwarder, drain_sec=DRAIN_SEC)
        except KeyboardInterrupt:
            wait.end()
        transport.record_receiver(self._scope.name, self.stats)
        deferred = self._scope.deferred.take()
        if deferred is not None:
            found.append(str(deferred))
        wait_bounds.tell_loss(error, found)

    def _wait_for_earlier_work(self) -> None:
        # Messages of earlier computations belong to the default receiver. A tap function that opens a receiver does not
        # wait, because it would wait for itself.
        if runtime.serves(threading.current_thread()):
            return
        try:
            inflight.wait(
                perf_counter() + self._timeout_sec,
                lambda: runtime.check_stalled(self._timeout_sec),
                self._devices,
            )
        except TapTimeoutError:
            logger.warning(
                "outfeed_receiver%s: the computations dispatched before it have not ended after %s s, and their "
                "messages count as this receiver's: wait for them first, or give more time (timeout_sec=)",
                f" {self._scope.name!r}" if self._scope.name else "",
                self._timeout_sec,
            )

    def _end_recording(self, problem: TapTimeoutError | None) -> None:
        for notes in self._rule_notes:
            notes.end()
        recorder = self._scope.recorder
        if recorder is None:
            return
        self._scope.deferred.find_steps()  # so that the log has them too
        if problem is not None:
            for receiver in runtime.receivers():
                if (
                    receiver.scope is self._scope and receiver.queued() > 1
                ):  # the last is the end-of-stream sentinel
                    recorder.lose(
                        receiver.name, 0, f"messages are recorded, but not all are delivered: {problem}"
                    )
        if recorder is self._record:  # a recorder of the user, who may go on using it
            recorder.flush()
        else:
            recorder.close()
        watch_termination.remove(recorder)  # not before: SIGTERM may come while it is being closed
        lost = sum(row.unrecorded for row in self.stats)
        if lost:
            unnoted = recorder.counters.unnoted_messages
            # Of all that is missing, dropped messages and those of other receivers included.
            says = (
                f"has no note of {unnoted} missing message(s)" if unnoted else "says where they are missing"
            )
            warnings.warn(
                f"{lost} message(s) were delivered but not recorded in {recorder.directory}: "
                f"{recorder.counters.failure}. The log {says}",
                receiver_options.RecordingWarning,
                stacklevel=user_stacklevel(),
            )


def _is_of_program(error: BaseException) -> bool:
    # JAX's fast dispatch raises ValueError where its other paths raise JaxRuntimeError.
    kinds = jax.errors.JaxRuntimeError, ValueError
    return isinstance(error, kinds) and re.match("[A-Z_]+: ", str(error)) is not None


@public
def outfeed_receiver(
    *,
    receiver_name: str = "",
    timeout_sec: float = 10.0,
    backends: Sequence[str] | None = None,
    devices: Sequence[jax.Device] | None = None,
    max_errors: int = MAX_KEPT,
    back_pressure: BackPressure | str = Policy.BLOCK,
    on_error: OnError | str = OnError.DEFER,
    on_failure: Literal["capsule"] | None = None,
    capsules: str | os.PathLike[str] | None = None,
    record: RecordTo | None = None,
    flight_recorder: str | os.PathLike[str] | None = None,
    process: Literal[False] = False,
    forward: str | Forward | None = None,
    spool: str | os.PathLike[str] | None = None,
    sinks: Sequence[ReceiverSink] = (),
    writers: Sequence[Any] = (),
) -> OutfeedReceiver:
    """Returns a context manager that counts and reports the taps of a part of the program, such as a training loop.

    Messages are also delivered without a receiver of this kind, because receiver threads start at the first tap. On
    entry it waits up to `timeout_sec` for computations dispatched before, because their messages are not its own. On
    exit it waits for all computations dispatched so far, from any thread, sends an END_OF_STREAM frame through each
    device, waits until all its messages are delivered, and raises the exceptions of tap functions.

    After Ctrl-C the exit takes about a second. One line on the standard error output, above the traceback, says what
    was not delivered or not forwarded by then. Recorded and spooled messages are in their files. Another Ctrl-C ends
    the program at once.

    Args:
        receiver_name: name in the summary and in errors.
        timeout_sec: seconds that one invocation of a tap function may take before the exit gives up; after an
            exception in the block, seconds that the whole exit may take.
        backends: platform names such as `["cpu"]`; by default all initialised backends.
        devices: devices of this process to receive from; exclusive with `backends`.
        max_errors: number of tap exceptions that are kept whole; further ones are counted per tap.
        back_pressure: action for a message that does not fit into a device's queue: "block" (the device waits, and no
            message is lost), another policy that `BackPressure` lists, such as "drop_newest", or a `BackPressure` with
            parameters. Drops are counted in `stats` and leave gaps in the sequence numbers.
        on_error: action for failed checks (see `check`): "defer" (they are raised on exit or by the next barrier),
            "warn" (they are logged, the first failure of each line at once, and not raised), "raise_soon" (as "defer",
            but the next call of a tapped function raises them already, on this thread and on threads that first used
            JAX after this receiver was made), "abort" (as "defer", and the program with the failed check ends with a
            `jax.errors.JaxRuntimeError`; if that leaves the block, the receiver raises the failed checks from it
            instead), "stop" (as "defer", and a stop is requested, so that loops with `stop=True` end and keep what they
            have computed). On several devices, "abort" ends the program on each device at its next failing check or
            other tap. Exceptions of tap functions follow the same policy, except that "abort" raises them as
            "raise_soon" does; the first one of each tap is always logged at once.
        on_failure: "capsule": the first failed check, NaN or exception of each source line, at most three, leaves a
            file in the folder `capsules`, at once, with the report, versions, devices, and, if the receiver records,
            the last messages; `hcb reproduce --show FILE` shows it. A step in `hcb.capsule` writes its failures itself,
            and then the program and its inputs are in the file, with which it can be run again.
        capsules: the folder of `on_failure="capsule"`; "capsules" by default. It is made when it is needed.

        record: short form of `sinks=[hcb.record(folder)]`. A folder: all messages are recorded there, in a tap log
            that `hcb cat` and `hostcallback.receiver.replay` read without this program. Or a recorder of
            `hcb.record(folder, ...)`, which has options and may be used again.

        flight_recorder: a folder, in shared memory (`/dev/shm`) or on disk. From now on until the process ends, the
            most recent messages of the devices are kept there, delivered or not, so that `hcb recover` finds them if
            the process is killed. A normal end of the process removes them. The environment variable
            `HOSTCALLBACK_FLIGHT_RECORDER` does the same.

        process: only False: receivers in a child process were removed.
        forward: short form of `sinks=[hcb.forward(address)]`: `host:port` of a collector (`hcb collect`), to which all
            messages are sent; or the result of `hcb.forward(...)`, which has options.
        spool: folder in which messages are stored before they are sent. If the process is killed, its messages are
            there, and the next process of the run sends them. By default a folder among the user's temporary files.

        sinks: sinks that get all messages of all taps, in addition to the taps' functions:
            `[hcb.record("logs"), hcb.forward("host:7070", spool="spool"), hcb.otlp("host:4317"), function]`. A
            function is called with each `hostcallback.Message`, on the device's receiver thread and in the device's
            order; a value that is sharded over several devices comes as a whole. Exceptions of a sink are raised like
            those of taps. A sink that takes batches (recorders, forwarders; `record_batch`) gets batches of frames.

        writers: writers of the metrics that `hcb.metrics` sends: `hcb.tensorboard("runs/1")`, `hcb.csv("m.csv")`,
            `hcb.jsonl("m.jsonl")`, or any object with `add_scalar`, `write_scalars`, `log_metrics`, `track`,
            `log_scalar` or `log`, such as a run of wandb. Each has a separate thread and queue. One that raises or
            blocks is reported once and counted (`writers` of the receiver), and nothing else waits for it. A barrier
            and the end of the receiver flush them; the end closes those of hostcallback.

    Raises:
        TypeError: `record` is neither a path nor a recorder, `forward` is not an address, or `sinks` is not a sequence
            of callables.
        ValueError: `devices` and `backends` are both given, a backend is unknown or has no devices here, `on_failure`
            is unknown, `process` is given, or another argument is out of range.
        DeviceClaimedError: (on entering) another open receiver has one of the devices.
        OSError: (on entering) `record` or `flight_recorder` is given, and the folder cannot be written.
        HostCallbackError: (on entering) `forward` is given, and the spool cannot be written.
        TapFunctionException: (on leaving) has the failed checks and the exceptions of tap functions.
        TapTimeoutError: (on leaving) a tap outlasted `timeout_sec`; names it and the number of queued messages.

    Example:
        with hcb.outfeed_receiver() as rx:
            train()
        print(rx.summary())
    """
    receiver_options.check_numbers(timeout_sec, max_errors)
    receiver_options.refuse_process(process)
    if not isinstance(back_pressure, BackPressure):
        back_pressure = BackPressure(policy=back_pressure)
    on_error = receiver_options.error_policy(on_error)
    taking = receiver_options.receiver_sinks(record, forward, spool, sinks, writers)
    folder = receiver_options.capsule_folder(on_failure, capsules)
    if on_error is OnError.ABORT:
        effect_dispatch.expect_failures()
    if on_error in (OnError.RAISE_SOON, OnError.ABORT):
        effect_dispatch.prepare()
    line = str(user_source_line())
    scope = Scope(receiver_name, max_errors, back_pressure, on_error, made_at=line)
    if folder is not None:
        from hostcallback.api.capsule_contents import FailureCapsules

        scope.deferred.unclaimed = FailureCapsules(folder, receiver_name, line)
    return OutfeedReceiver(
        scope, transport.choose_devices(backends, devices), timeout_sec, taking, flight_recorder
    )
