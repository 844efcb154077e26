"""hostcallback: the tap runtime for JAX.

Device code inside `jit`, `scan`, `vmap`, `grad`, `shard_map` emits tagged messages; per-device receiver threads
decode them and call Python tap functions.
"""

from __future__ import annotations

import hostcallback.custom_partitions
import hostcallback.experimental_rules
import hostcallback.kernels
import hostcallback.lowering
import hostcallback.process_end  # noqa: F401, it registers exit and fork handlers
from hostcallback.accelerate import AcceleratedCallback, Acceleration, accelerate
from hostcallback.barrier import barrier_wait
from hostcallback.breakpoint import breakpoint
from hostcallback.call import call
from hostcallback.check import check, disable_checks, enable_checks
from hostcallback.checked import checked
from hostcallback.control import TapSelection, control_file, taps
from hostcallback.debug import callback, log, print
from hostcallback.discharge import installed as _fast_dispatch  # noqa: F401, it installs itself
from hostcallback.export import bind, export_checks, unbind
from hostcallback.forwarding import ForwardingWarning
from hostcallback.jit import jit
from hostcallback.nonfinite import Operation, watch_nonfinite
from hostcallback.outfeed import (
    OutfeedReceiver,
    RecordingWarning,
    error_collector,
    outfeed_receiver,
)
from hostcallback.tap import id_print, id_tap
from receiver.control.errors import RuleFileError
from receiver.errors import (
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
from receiver.messages.check_report import CheckError, FailedCheck
from receiver.messages.deferred_errors import OnError
from receiver.remote.options import Forward
from receiver.remote.otlp.exporter import OtlpExporter, otlp_exporter
from receiver.runtime.prometheus import register as prometheus_collector
from receiver.sinks.nonfinite import NonFiniteError
from receiver.sources.back_pressure import BackPressure
from receiver.taplog.writing.recorder import Recorder, record
from receiver.wire.truncation import Head

__version__ = "0.1.0"

__all__ = [
    "AcceleratedCallback",
    "Acceleration",
    "BackPressure",
    "BreakpointError",
    "BreakpointQuit",
    "CallResultError",
    "CheckError",
    "DeviceClaimedError",
    "FailedCheck",
    "Forward",
    "ForwardingWarning",
    "Head",
    "HostCallbackError",
    "IncompleteValueError",
    "LostMessagesError",
    "NativeLibraryError",
    "NonFiniteError",
    "OnError",
    "Operation",
    "OtlpExporter",
    "OutfeedReceiver",
    "Recorder",
    "RecordingWarning",
    "ReentrantWaitError",
    "RuleFileError",
    "TapFailure",
    "TapFunctionException",
    "TapSelection",
    "TapTimeoutError",
    "UnboundConsumerError",
    "UnknownConsumerError",
    "accelerate",
    "barrier_wait",
    "bind",
    "breakpoint",
    "call",
    "callback",
    "check",
    "checked",
    "control_file",
    "disable_checks",
    "enable_checks",
    "error_collector",
    "export_checks",
    "id_print",
    "id_tap",
    "jit",
    "log",
    "otlp_exporter",
    "outfeed_receiver",
    "print",
    "prometheus_collector",
    "record",
    "taps",
    "unbind",
    "watch_nonfinite",
]
