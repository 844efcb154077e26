"""The options of `outfeed_receiver`: their checks, and what is made of them: sinks, folders and a forwarder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from hostcallback.lifecycle.job import job_id, process_index
from hostcallback.lifecycle.receivers import device_name
from hostcallback.receiver import tap_arguments
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.messages import Sink
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.runtime.dispatch.scope import BatchSink
from hostcallback.receiver.runtime.signals import watch_termination
from hostcallback.receiver.sinks.metric_writers.sink import MetricsSink
from hostcallback.receiver.taplog.writing.recorder import Recorder
from hostcallback.receiver.text import without_password
from hostcallback.tracing.source_line import user_source_line

RecordTo = str | os.PathLike[str] | Recorder
"""The folder of a tap log, or a recorder that writes to one."""

ReceiverSink = Callable[..., Any] | BatchSink | Forward
"""An element of `sinks=`: a callable, a sink that takes batches, or the options of a forwarder."""


class RecordingWarning(UserWarning):
    """A receiver delivered messages that it could not record.

    Example:
        warnings.simplefilter("error", hcb.RecordingWarning)  # an incomplete log is an error
    """


class MetricsWarning(UserWarning):
    """A writer of metrics raised, was blocked, or cannot hold what it was given. The others have everything.

    Example:
        warnings.simplefilter("error", hcb.MetricsWarning)  # missing metrics are an error
    """


@dataclass(frozen=True)
class ReceiverSinks:
    """The sinks of a receiver, in addition to the taps' sinks.

    Attributes:
        record: the folder or the recorder that `stats` reports on; None if the receiver does not record.
        forward: options of the forwarder; None if the receiver does not forward.
        batches: other sinks that take batches.
        messages: sinks that take messages.
        metrics: hands the metrics to `writers=`; None without writers.
    """

    record: RecordTo | None = None
    forward: Forward | None = None
    batches: tuple[BatchSink, ...] = ()
    messages: tuple[Sink, ...] = ()
    metrics: MetricsSink | None = None


def receiver_sinks(
    record: RecordTo | None,
    forward: str | Forward | None,
    spool: str | os.PathLike[str] | None,
    sinks: Any,
    writers: Any = (),
) -> ReceiverSinks:
    """Combines `sinks=` with its short forms `record=`, `forward=` and `spool=`, and reads `writers=`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: two forwarders are given, or `spool` is given without an address in `forward`.
    """
    if record is not None and not isinstance(record, str | os.PathLike | Recorder):
        raise TypeError(
            f"record is of type {type(record).__name__}, expected the path of a folder, or what hcb.record(path) "
            "returns"
        )
    if spool is not None and not isinstance(forward, str):
        raise ValueError(
            f"spool is {spool!r}, and forward is {forward!r}: give forward='host:port', or hcb.forward"
        )
    options = Forward(forward, spool=spool) if isinstance(forward, str) else forward
    if options is not None and not isinstance(options, Forward):
        raise TypeError(f"forward is a {type(options).__name__}, expected 'host:port' or hcb.forward(...)")
    if not isinstance(sinks, Sequence) or isinstance(sinks, str):
        raise TypeError(
            f"sinks is {without_password(repr(sinks))}, expected a sequence, such as [hcb.record('logs'), function]"
        )
    batches: list[BatchSink] = []
    messages: list[Sink] = []
    for sink in sinks:
        if isinstance(sink, Forward):
            if options is not None:
                raise ValueError(
                    f"messages are to be forwarded to {options.shown_address} and to {sink.shown_address}: a receiver "
                    "forwards to one collector"
                )
            options = sink
        elif isinstance(sink, Recorder) and record is None:
            record = sink
        elif isinstance(sink, BatchSink):
            batches.append(sink)
        elif callable(sink):
            tap_arguments.refuse_async(sink, "sinks")
            messages.append(sink)
        else:
            raise TypeError(
                f"sinks has {sink!r}, expected a callable that takes a message, or what hcb.record, hcb.forward or "
                "hcb.otlp returns"
            )
    return ReceiverSinks(record, options, tuple(batches), tuple(messages), _metrics_sink(writers, messages))


def _metrics_sink(writers: Any, sinks: list[Any]) -> MetricsSink | None:
    if not isinstance(writers, Sequence) or isinstance(writers, str):
        raise TypeError(
            f"writers is {writers!r:.80}, expected a sequence, such as [hcb.tensorboard('runs/1'), hcb.csv('m.csv')]"
        )
    # A sink such as a live plot takes metrics as a writer does: reduced to one value per step.
    both = [sink for sink in sinks if getattr(type(sink), "takes_records", False) and sink not in writers]
    return MetricsSink([*writers, *both]) if writers or both else None


def capsule_folder(on_failure: Any, capsules: Any) -> Path | None:
    """Returns the folder of `on_failure="capsule"`; None if failures leave no capsules.

    Raises:
        TypeError: `capsules` is no path.
        ValueError: `on_failure` is unknown, or `capsules` is given without it.
    """
    if on_failure not in (None, "capsule"):
        raise ValueError(f"on_failure is {on_failure!r:.80}, expected 'capsule', or None for no capsules")
    if capsules is None:
        return Path("capsules") if on_failure else None
    if not isinstance(capsules, str | os.PathLike):
        raise TypeError(f"capsules is a {type(capsules).__name__}, expected the path of a folder")
    if on_failure is None:
        raise ValueError(f"capsules is {capsules!r}, and on_failure is None: give on_failure='capsule' too")
    return Path(capsules)


def refuse_process(process: Any) -> None:
    """Raises ValueError for `process=True`, which earlier versions took."""
    if process:
        raise ValueError(
            "process=True was removed: no child process delivers taps any more. To have them while the program's "
            "own Python is busy, record them (record=FOLDER) and read them in another process (hcb tail -f FOLDER); to "
            "have the last ones of a program that is killed, use flight_recorder=FOLDER and hcb recover"
        )


def check_numbers(timeout_sec: float, max_errors: int) -> None:
    """Raises ValueError for a number that is out of range."""
    if not isinstance(timeout_sec, int | float) or not 0 <= timeout_sec < float("inf"):
        raise ValueError(f"timeout_sec is {timeout_sec!r}, expected a finite number of seconds, 0 or more")
    if not isinstance(max_errors, int) or max_errors < 1:
        raise ValueError(f"max_errors is {max_errors!r}, expected a whole number of at least 1")


def error_policy(on_error: OnError | str) -> OnError:
    """Returns the policy with that name. Raises ValueError for an unknown name."""
    try:
        return OnError(on_error)
    except ValueError:
        policies = ", ".join(repr(str(policy)) for policy in OnError)
        raise ValueError(
            f"on_error is {on_error!r}, expected one of {policies}, at {user_source_line()}"
        ) from None


class ForwardingWarning(UserWarning):
    """A receiver delivered messages that its collector does not have, or does not have yet.

    Example:
        warnings.simplefilter("error", hcb.ForwardingWarning)  # messages that the collector lacks are an error
    """


def open_forwarder(options: Forward) -> Forwarder:
    """Opens a forwarder. At SIGTERM it also forwards the messages that the devices have emitted by then.

    Raises:
        HostCallbackError: the spool cannot be made, or a file is not a certificate or key.
    """
    devices = {device_name(device): number for number, device in enumerate(jax.local_devices())}
    forwarder = Forwarder(options, process_index=process_index(), local_devices=devices, job=job_id())
    watch_termination.add(forwarder)
    return forwarder


def end_forwarding(forwarder: Forwarder, *, drain_sec: float | None = None) -> list[str]:
    """Waits up to `drain_sec` for the collector, and returns what to warn of: messages that it does not have.

    Args:
        forwarder: the forwarder of the receiver.
        drain_sec: seconds to wait, if less than the forwarder's own.
    """
    if drain_sec is not None:
        forwarder.limit_drain(drain_sec)
    # Unregistered only after it is closed: a SIGTERM during the wait must still reach it.
    forwarder.close()
    watch_termination.remove(forwarder)
    return forwarder.missing()
