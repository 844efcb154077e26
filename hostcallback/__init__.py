"""hostcallback: the tap runtime for JAX.

Device code inside `jit`, `scan`, `vmap`, `grad`, `shard_map` emits tagged messages; per-device receiver threads
decode them and call Python tap functions.

The import is small. A name is loaded when it is first used. JAX is not imported: what the package changes in JAX is
there as soon as JAX is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hostcallback._one_copy import refuse_second_copy
from hostcallback._with_jax import once_jax_is_imported

if TYPE_CHECKING:
    from typing import Any

    from hostcallback import receiver as receiver
    from hostcallback.api.accelerate import AcceleratedCallback, Acceleration, accelerate
    from hostcallback.api.barrier import barrier_wait
    from hostcallback.api.call import call
    from hostcallback.api.capsule.capsule import capsule
    from hostcallback.api.check import check, checked, disable_checks, enable_checks, error_collector
    from hostcallback.api.debug import breakpoint as breakpoint, callback, log, print as print
    from hostcallback.api.export import bind, export_checks, unbind
    from hostcallback.api.observe.observe import observe
    from hostcallback.api.observe.places import Site
    from hostcallback.api.outputs.capture import Capture, capture
    from hostcallback.api.outputs.live_plot import LivePlot, live_plot
    from hostcallback.api.outputs.metrics import histogram, image, metrics, text
    from hostcallback.api.outputs.page import Ui, ui
    from hostcallback.api.progress import Progress, fori_loop, progress, scan, while_loop
    from hostcallback.api.receiver import (
        OutfeedReceiver,
        outfeed_receiver,
    )
    from hostcallback.api.receiver_options import MetricsWarning, RecordingWarning
    from hostcallback.api.tap import id_print, id_tap, jit, tap
    from hostcallback.api.taps import TapSelection, control_file, taps
    from hostcallback.api.watch.diagnosis import Operation
    from hostcallback.api.watch.watch import watch_nonfinite
    from hostcallback.lifecycle.forwarding import ForwardingWarning
    from hostcallback.receiver.control.protocol import RuleFileError
    from hostcallback.receiver.errors import (
        BreakpointError,
        BreakpointQuit,
        CallResultError,
        DeviceClaimedError,
        HostCallbackError,
        IncompleteValueError,
        LostMessagesError,
        NativeLibraryError,
        ReentrantWaitError,
        TapFailure,
        TapFunctionException,
        TapTimeoutError,
        UnboundConsumerError,
        UnknownConsumerError,
    )
    from hostcallback.receiver.failures.check_report import CheckError, FailedCheck
    from hostcallback.receiver.failures.deferred_errors import OnError
    from hostcallback.receiver.messages import Message
    from hostcallback.receiver.remote.options import Forward, forward
    from hostcallback.receiver.remote.otlp.exporter import OtlpExporter, otlp_exporter, otlp_exporter as otlp
    from hostcallback.receiver.runtime.metrics import register as prometheus_collector
    from hostcallback.receiver.sinks.metric_writers.adapters import tensorboard
    from hostcallback.receiver.sinks.metric_writers.files import csv as csv, jsonl
    from hostcallback.receiver.sinks.metric_writers.sink import WriterStats
    from hostcallback.receiver.sinks.nonfinite import NonFiniteError
    from hostcallback.receiver.sources.back_pressure import BackPressure
    from hostcallback.receiver.taplog.columns.log_data import LogData, TapData, UnknownTapError, read
    from hostcallback.receiver.taplog.writing.recorder import Recorder, record
    from hostcallback.receiver.wire.truncation import TruncatedArray, TruncatedArray as Head

__version__ = "0.4.0.dev0"

_NAMED_AS_BUILTINS = ("breakpoint", "csv", "print")
"""Public names that `from hostcallback import *` leaves out: Python and its library have them too."""

__all__ = [
    "AcceleratedCallback",
    "Acceleration",
    "BackPressure",
    "BreakpointError",
    "BreakpointQuit",
    "CallResultError",
    "Capture",
    "CheckError",
    "DeviceClaimedError",
    "FailedCheck",
    "Forward",
    "ForwardingWarning",
    "Head",
    "HostCallbackError",
    "IncompleteValueError",
    "LivePlot",
    "LogData",
    "LostMessagesError",
    "Message",
    "MetricsWarning",
    "NativeLibraryError",
    "NonFiniteError",
    "OnError",
    "Operation",
    "OtlpExporter",
    "OutfeedReceiver",
    "Progress",
    "Recorder",
    "RecordingWarning",
    "ReentrantWaitError",
    "RuleFileError",
    "Site",
    "TapData",
    "TapFailure",
    "TapFunctionException",
    "TapSelection",
    "TapTimeoutError",
    "TruncatedArray",
    "Ui",
    "UnboundConsumerError",
    "UnknownConsumerError",
    "UnknownTapError",
    "WriterStats",
    "accelerate",
    "barrier_wait",
    "bind",
    "call",
    "callback",
    "capsule",
    "capture",
    "check",
    "checked",
    "control_file",
    "disable_checks",
    "enable_checks",
    "error_collector",
    "export_checks",
    "fori_loop",
    "forward",
    "histogram",
    "id_print",
    "id_tap",
    "image",
    "jit",
    "jsonl",
    "live_plot",
    "log",
    "metrics",
    "observe",
    "otlp",
    "otlp_exporter",
    "outfeed_receiver",
    "progress",
    "prometheus_collector",
    "read",
    "record",
    "scan",
    "tap",
    "taps",
    "tensorboard",
    "text",
    "ui",
    "unbind",
    "watch_nonfinite",
    "while_loop",
]

_PLACES = {
    "AcceleratedCallback": "api.accelerate",
    "Acceleration": "api.accelerate",
    "BackPressure": "receiver.sources.back_pressure",
    "BreakpointError": "receiver.errors",
    "BreakpointQuit": "receiver.errors",
    "CallResultError": "receiver.errors",
    "Capture": "api.outputs.capture",
    "CheckError": "receiver.failures.check_report",
    "DeviceClaimedError": "receiver.errors",
    "FailedCheck": "receiver.failures.check_report",
    "Forward": "receiver.remote.options",
    "ForwardingWarning": "lifecycle.forwarding",
    "Head": "receiver.wire.truncation:TruncatedArray",
    "HostCallbackError": "receiver.errors",
    "IncompleteValueError": "receiver.errors",
    "LivePlot": "api.outputs.live_plot",
    "LogData": "receiver.taplog.columns.log_data",
    "LostMessagesError": "receiver.errors",
    "Message": "receiver.messages",
    "MetricsWarning": "api.receiver_options",
    "NativeLibraryError": "receiver.errors",
    "UnknownTapError": "receiver.taplog.columns.log_data",
    "NonFiniteError": "receiver.sinks.nonfinite",
    "OnError": "receiver.failures.deferred_errors",
    "Operation": "api.watch.diagnosis",
    "OtlpExporter": "receiver.remote.otlp.exporter",
    "OutfeedReceiver": "api.receiver",
    "Progress": "api.progress",
    "Recorder": "receiver.taplog.writing.recorder",
    "RecordingWarning": "api.receiver_options",
    "ReentrantWaitError": "receiver.errors",
    "RuleFileError": "receiver.control.protocol",
    "Site": "api.observe.places",
    "TapData": "receiver.taplog.columns.log_data",
    "TapFailure": "receiver.errors",
    "TapFunctionException": "receiver.errors",
    "TapSelection": "api.taps",
    "TapTimeoutError": "receiver.errors",
    "TruncatedArray": "receiver.wire.truncation",
    "Ui": "api.outputs.page",
    "UnboundConsumerError": "receiver.errors",
    "UnknownConsumerError": "receiver.errors",
    "WriterStats": "receiver.sinks.metric_writers.sink",
    "accelerate": "api.accelerate",
    "barrier_wait": "api.barrier",
    "bind": "api.export",
    "breakpoint": "api.debug",
    "call": "api.call",
    "callback": "api.debug",
    "capsule": "api.capsule.capsule",
    "capture": "api.outputs.capture",
    "check": "api.check",
    "checked": "api.check",
    "control_file": "api.taps",
    "csv": "receiver.sinks.metric_writers.files",
    "disable_checks": "api.check",
    "enable_checks": "api.check",
    "error_collector": "api.check",
    "export_checks": "api.export",
    "fori_loop": "api.progress",
    "forward": "receiver.remote.options",
    "histogram": "api.outputs.metrics",
    "id_print": "api.tap",
    "id_tap": "api.tap",
    "image": "api.outputs.metrics",
    "jit": "api.tap",
    "jsonl": "receiver.sinks.metric_writers.files",
    "live_plot": "api.outputs.live_plot",
    "log": "api.debug",
    "metrics": "api.outputs.metrics",
    "observe": "api.observe.observe",
    "otlp": "receiver.remote.otlp.exporter:otlp_exporter",
    "otlp_exporter": "receiver.remote.otlp.exporter",
    "outfeed_receiver": "api.receiver",
    "print": "api.debug",
    "progress": "api.progress",
    "prometheus_collector": "receiver.runtime.metrics:register",
    "read": "receiver.taplog.columns.log_data",
    "record": "receiver.taplog.writing.recorder",
    "scan": "api.progress",
    "tap": "api.tap",
    "taps": "api.taps",
    "tensorboard": "receiver.sinks.metric_writers.adapters",
    "text": "api.outputs.metrics",
    "ui": "api.outputs.page",
    "unbind": "api.export",
    "watch_nonfinite": "api.watch.watch",
    "while_loop": "api.progress",
}
"""The module of each name, and after a colon what it is called there."""

if not TYPE_CHECKING:  # else a name that does not exist would be one of type Any

    def __getattr__(name: str) -> Any:
        if name == "receiver":
            return importlib.import_module("hostcallback.receiver")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
        place, _, attribute = _PLACES[name].partition(":")
        if not place.startswith("receiver."):
            importlib.import_module("hostcallback.api")  # the rules of all primitives, the exit handler
        value = getattr(importlib.import_module(f"hostcallback.{place}"), attribute or name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    # Without the packages that were imported meanwhile: they are internal, apart from these two.
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, *__all__, *_NAMED_AS_BUILTINS, "host_callback", "receiver"})


def _change_jax() -> None:
    # Taps are dispatched fast under every jit, and programs with taps that were exported can be read.
    importlib.import_module("hostcallback.lowering.discharge")
    from hostcallback.receiver import environment

    if environment.ACCELERATE.text():
        importlib.import_module("hostcallback.api.accelerate")
    if any(variable.text() for variable in (environment.CAPSULES, environment.OBSERVE, environment.WATCH)):
        importlib.import_module("hostcallback.api.whole_process").open_asked()


refuse_second_copy(__file__)
once_jax_is_imported(_change_jax, needs="hostcallback._jax_compat")
