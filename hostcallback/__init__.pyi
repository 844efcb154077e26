"""The public names, once: type checkers read this file, and `__init__.py` finds in it where each name is."""

from hostcallback import receiver as receiver
from hostcallback.api.accelerate import (
    AcceleratedCallback as AcceleratedCallback,
    Acceleration as Acceleration,
    accelerate as accelerate,
)
from hostcallback.api.barrier import barrier_wait as barrier_wait
from hostcallback.api.call import call as call
from hostcallback.api.capsule.capsule import capsule as capsule
from hostcallback.api.check import (
    check as check,
    checked as checked,
    disable_checks as disable_checks,
    enable_checks as enable_checks,
    error_collector as error_collector,
)
from hostcallback.api.debug import breakpoint as breakpoint, callback as callback, log as log, print as print
from hostcallback.api.export import bind as bind, export_checks as export_checks, unbind as unbind
from hostcallback.api.knob import knob as knob, knobs as knobs
from hostcallback.api.loops.progress import (
    Progress as Progress,
    fori_loop as fori_loop,
    progress as progress,
    scan as scan,
    while_loop as while_loop,
)
from hostcallback.api.loops.stopping import (
    clear_stop as clear_stop,
    stop_on_signals as stop_on_signals,
    stop_requested as stop_requested,
)
from hostcallback.api.observe.observe import observe as observe
from hostcallback.api.observe.places import Site as Site
from hostcallback.api.observe.spans import span as span
from hostcallback.api.outputs.capture import Capture as Capture, capture as capture
from hostcallback.api.outputs.live_plot import LivePlot as LivePlot, live_plot as live_plot
from hostcallback.api.outputs.metrics import (
    histogram as histogram,
    image as image,
    metrics as metrics,
    text as text,
)
from hostcallback.api.outputs.page import Ui as Ui, ui as ui
from hostcallback.api.receiver import OutfeedReceiver as OutfeedReceiver, outfeed_receiver as outfeed_receiver
from hostcallback.api.receiver_options import (
    ForwardingWarning as ForwardingWarning,
    MetricsWarning as MetricsWarning,
    RecordingWarning as RecordingWarning,
)
from hostcallback.api.tap import id_print as id_print, id_tap as id_tap, jit as jit, tap as tap
from hostcallback.api.taps import TapSelection as TapSelection, control_file as control_file, taps as taps
from hostcallback.api.watch.diagnosis import Operation as Operation
from hostcallback.api.watch.watch import watch_nonfinite as watch_nonfinite
from hostcallback.receiver.control.protocol import RuleFileError as RuleFileError
from hostcallback.receiver.errors import (
    BreakpointError as BreakpointError,
    BreakpointQuit as BreakpointQuit,
    CallResultError as CallResultError,
    DeviceClaimedError as DeviceClaimedError,
    HostCallbackError as HostCallbackError,
    IncompleteValueError as IncompleteValueError,
    JobError as JobError,
    LostMessagesError as LostMessagesError,
    NativeLibraryError as NativeLibraryError,
    ReentrantWaitError as ReentrantWaitError,
    TapFailure as TapFailure,
    TapFunctionException as TapFunctionException,
    TapTimeoutError as TapTimeoutError,
    UnboundConsumerError as UnboundConsumerError,
    UnknownConsumerError as UnknownConsumerError,
)
from hostcallback.receiver.failures.check_report import CheckError as CheckError, FailedCheck as FailedCheck
from hostcallback.receiver.failures.deferred_errors import OnError as OnError
from hostcallback.receiver.messages import Message as Message
from hostcallback.receiver.remote.options import Forward as Forward, forward as forward
from hostcallback.receiver.remote.otlp.exporter import OtlpExporter as OtlpExporter, otlp as otlp
from hostcallback.receiver.runtime.knobs import UnknownKnobError as UnknownKnobError
from hostcallback.receiver.runtime.metrics import prometheus_collector as prometheus_collector
from hostcallback.receiver.sinks.metric_writers.adapters import tensorboard as tensorboard
from hostcallback.receiver.sinks.metric_writers.files import csv as csv, jsonl as jsonl
from hostcallback.receiver.sinks.metric_writers.sink import WriterStats as WriterStats
from hostcallback.receiver.sinks.nonfinite import NonFiniteError as NonFiniteError
from hostcallback.receiver.sources.back_pressure import BackPressure as BackPressure
from hostcallback.receiver.stop_request import request_stop as request_stop
from hostcallback.receiver.taplog.columns.log_data import (
    LogData as LogData,
    TapData as TapData,
    UnknownTapError as UnknownTapError,
    read as read,
)
from hostcallback.receiver.taplog.writing.recorder import Recorder as Recorder, record as record
from hostcallback.receiver.wire.truncation import TruncatedArray as TruncatedArray

__version__: str
