"""hostcallback: the tap runtime for JAX.

Device code inside `jit`, `scan`, `vmap`, `grad`, `shard_map` emits tagged messages; per-device receiver threads
decode them and call Python tap functions.
"""

from __future__ import annotations

import hostcallback.lowering.call
import hostcallback.lowering.custom_partitioning
import hostcallback.lowering.pallas
import hostcallback.lowering.tap
import hostcallback.primitives.experimental_rules
import hostcallback.shutdown  # noqa: F401, it registers exit and fork handlers
from hostcallback.api.accelerate import AcceleratedCallback, Acceleration, accelerate
from hostcallback.api.barrier import barrier_wait
from hostcallback.api.breakpoint import breakpoint
from hostcallback.api.call import call
from hostcallback.api.check import check, disable_checks, enable_checks
from hostcallback.api.checked import checked
from hostcallback.api.debug import callback, log, print
from hostcallback.api.export import bind, export_checks, unbind
from hostcallback.api.nonfinite import Operation, watch_nonfinite
from hostcallback.api.receiver import (
    OutfeedReceiver,
    RecordingWarning,
    error_collector,
    outfeed_receiver,
)
from hostcallback.api.tap import id_print, id_tap
from hostcallback.api.taps import TapSelection, control_file, taps
from hostcallback.lifecycle.forwarding import ForwardingWarning
from hostcallback.lowering.discharge import installed as _fast_dispatch  # noqa: F401, it installs itself
from hostcallback.primitives.jit import jit
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
from receiver.messages.message import Message
from receiver.remote.options import Forward, forward
from receiver.remote.otlp.exporter import OtlpExporter, otlp_exporter, otlp_exporter as otlp
from receiver.runtime.prometheus import register as prometheus_collector
from receiver.sinks.nonfinite import NonFiniteError
from receiver.sources.back_pressure import BackPressure
from receiver.taplog.writing.recorder import Recorder, record
from receiver.wire.truncation import TruncatedArray

Head = TruncatedArray  # its earlier name

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
    "Message",
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
    "TruncatedArray",
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
    "forward",
    "id_print",
    "id_tap",
    "jit",
    "log",
    "otlp",
    "otlp_exporter",
    "outfeed_receiver",
    "print",
    "prometheus_collector",
    "record",
    "taps",
    "unbind",
    "watch_nonfinite",
]
