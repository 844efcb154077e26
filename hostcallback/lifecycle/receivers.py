"""Chooses the transport of a platform's taps, starts its receivers, and reports closed ones to `jax.monitoring`."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.monitoring
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle.job import this_job
from hostcallback.receiver import environment, errors, processes
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime import signals, stats
from hostcallback.receiver.runtime.dispatch.calls import CallsInPlace, CallThreads
from hostcallback.receiver.runtime.rules.admission import Answer, Decisions
from hostcallback.receiver.runtime.runtime import Supervisor, runtime
from hostcallback.receiver.sources.queue import QueueSource
from hostcallback.receiver.sources.ring import RingSource
from hostcallback.receiver.sources.ring_batch import RingConfig
from hostcallback.receiver.sources.source import Source
from hostcallback.receiver.wire import array_types, frame, truncation

FFI_TARGET = "hostcallback_tap"
FFI_SHARD_TARGET = "hostcallback_tap_shard"
FFI_CALL_TARGET = "hostcallback_call"
FFI_CLOCK_TARGET = "hostcallback_clock"
FFI_OUTPUT_TARGET = "hostcallback_wait_for_output"
FFI_CELL_TARGET = "hostcallback_cell"
NATIVE_PLATFORMS = ("cpu", "cuda", "rocm")
GPU_PLATFORMS = ("cuda", "rocm")

ENDED_BY_CHECK = 'and its receiver\'s on_error="abort" ends the program'
"""Part of the text of JAX's error if a failed check ended a program. `receiver/native/handlers` has it, too."""

_lock = threading.Lock()  # protects `_started`, `_queues` and `_supervisor`
_started: set[str] = set()
_queues: dict[str, QueueSource] = {}
_supervisor: Supervisor | None = None


def device_name(device: jax.Device) -> str:
    """Returns the name of a device in reports, such as `cpu:0`."""
    return f"{device.platform}:{device.id}"


@functools.cache
def use_native(platform: str) -> bool:
    """Whether the platform's taps go through the native handler; if not, they go through Python callbacks.

    Raises:
        ValueError: `HOSTCALLBACK_TRANSPORT` holds neither `native` nor `callback`.
        NativeLibraryError: it holds `native` and the library, or a GPU's driver, cannot be loaded.
    """
    choice = environment.TRANSPORT.read()
    if platform not in NATIVE_PLATFORMS or choice == "callback":
        return False
    try:
        native_library.load()
        # A program for GPUs that this machine does not have will run on another machine.
        if platform in GPU_PLATFORMS and local_devices(platform):
            native_library.open_gpu(platform)
    except errors.NativeLibraryError as error:
        if choice == "native":
            raise
        logger.warning("taps on %s use the slower callback transport: %s", platform, error)
        return False
    return True


def calls_natively(platform: str) -> bool:
    """Whether `hcb.call` goes through a native handler.

    On a GPU it does not, although the taps do: the device is idle while a host function runs, and XLA's callback
    already copies the results back.
    """
    return platform not in GPU_PLATFORMS and use_native(platform)


def start(platform: str) -> None:
    """Starts the receivers of the platform's local devices unless they run. Any thread."""
    global _supervisor
    platform = compat.lowering_platform(platform)
    # Held during the start, so that a second program does not run before its receiver does.
    with _lock:
        if platform in _started:
            return
        native = use_native(platform)
        devices = local_devices(platform)
        if native and devices:
            _register_handlers(platform)
            _supervisor = _supervisor or Supervisor(runtime)
        if devices:
            _record_flight()
        for device in devices:
            make_source = functools.partial(_make_source, device, platform if native else None)
            runtime.exported.is_first_process = not jax.process_index()
            runtime.start(device_name(device), device, make_source, CallThreads if native else CallsInPlace)
        _started.add(platform)
    signals.watch_interrupt.start(runtime)
    this_job.start()
    endpoints.start()


def _deliver(timeout_sec: float) -> None:
    runtime.wait_delivered(deadline=time.perf_counter() + timeout_sec)


signals.watch_termination.deliver = _deliver


def _record_flight() -> None:
    # A program must not fail because the folder of the flight recorder cannot be written.
    directory = environment.FLIGHT_RECORDER.read()
    if directory is None:
        return
    try:
        runtime.record_flight(directory)
    except OSError as error:
        logger.warning("%s=%s: no flight is recorded: %s", environment.FLIGHT_RECORDER, directory, error)


def started() -> bool:
    """Whether any receiver runs."""
    return bool(_started)


def local_devices(platform: str) -> list[jax.Device]:
    """Returns the local devices of a platform; none if the platform has no backend here."""
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # the program is lowered for a platform that this machine does not have
        return []


def forget() -> None:
    """Drops all state, for a forked child, in which no receivers run."""
    global _lock, _supervisor
    _supervisor = None
    _lock = threading.Lock()
    _started.clear()
    _queues.clear()


processes.in_child(processes.Stage.PROGRAM, forget)


def _make_source(device: jax.Device, native_platform: str | None) -> Source:
    if native_platform in GPU_PLATFORMS:
        # XLA's FFI identifies a GPU by its index within the process.
        keep = functools.partial(runtime.attach_flight_file, device_name(device))
        return RingSource.open_gpu(
            device.local_hardware_id, device.id, RingConfig.from_environment(), before_use=keep
        )
    if native_platform is not None:
        return RingSource.open(device.id, RingConfig.from_environment())
    source = _queues.get(device_name(device))
    if source is None:
        source = _queues[device_name(device)] = QueueSource(device.id)
    return source


@functools.cache
def _register_handlers(platform: str) -> None:
    # Not called at import, because JAX reports a registration before the backend exists as a failure of the backend.
    library = native_library.load()
    if platform in GPU_PLATFORMS:
        handlers = {FFI_TARGET: library.hcb_gpu_tap, FFI_SHARD_TARGET: library.hcb_gpu_tap_shard}
        platform = platform.upper()
    else:
        handlers = {
            FFI_TARGET: library.hcb_tap,
            FFI_SHARD_TARGET: library.hcb_tap_shard,
            FFI_CALL_TARGET: library.hcb_call_host,
            FFI_CLOCK_TARGET: library.hcb_clock,
            FFI_OUTPUT_TARGET: library.hcb_wait_for_output,
            FFI_CELL_TARGET: library.hcb_cell,
        }
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=platform)
    runtime.rule_table.use(library, runtime.registry)


def _holds(consumer: Consumer, arrays: Sequence[Any]) -> bool:
    return consumer.is_check and bool(np.all(arrays[0]))


def _end_failing_program(consumer: Consumer, device: int) -> None:
    if consumer.is_check and runtime.rule_table.aborts(device):
        raise RuntimeError(
            f"hostcallback: a check failed, at {consumer.source_line}, {ENDED_BY_CHECK}; the receiver and barrier_wait "
            "report its values"
        )


def callback_emitter(
    platform: str,
    consumer: Consumer,
    prefix: bytes,
    dtypes: Sequence[np.dtype[Any]],
    devices: list[jax.Device] | None,
) -> Callable[..., tuple[()]]:
    """Returns the Python function that a tapped program calls on platforms without a native handler.

    It takes the partition's index and the tapped arrays, and puts a frame into the queue of the device that
    runs it. XLA calls it on one of its threads.
    """

    header = frame.decode_header(prefix)

    def emit(partition: Any, *arrays: Any) -> tuple[()]:
        source = _queue_of(platform, devices, int(partition))
        admission = runtime.rule_table.admission(consumer)
        elements, answer, now_ns = None, Answer.SEND, time.time_ns()
        if consumer.is_check:
            if runtime.rule_table.is_off(consumer, source.device) or _holds(consumer, arrays):
                return ()
        elif admission is not None:
            answer = admission.ask(source.device, now_ns)
            if answer is Answer.LEAVE_OUT:
                return ()
            elements = admission.rule.truncate
        sent, emitted = prefix, _as_emitted(arrays, dtypes)
        if elements is not None and any(array.size > elements for array in emitted):
            emitted = [
                truncation.shape_record([a.shape for a in emitted]),
                *[truncation.cut(a, elements) for a in emitted],
            ]
            specs = [array_types.ArraySpec.of(head.dtype, head.shape) for head in emitted]
            sent = frame.encode_prefix(header.consumer_id, header.flags | frame.Flags.TRUNCATED, specs)
        if admission is not None and answer is Answer.TOO_SOON:
            admission.keep(source.device, source, sent, emitted, now_ns)
            return ()
        source.emit(sent, emitted)
        _end_failing_program(consumer, source.device)
        return ()

    return emit


def callback_shard_emitter(
    platform: str,
    consumer: Consumer,
    flags: int,
    dtypes: Sequence[np.dtype[Any]],
    devices: list[jax.Device] | None,
) -> Callable[..., None]:
    """Returns the function of `callback_emitter` for shards, which takes the shard record before the arrays.

    A Python callback does not know the launch that calls it, so occurrences are counted over all launches, and a
    number per program takes the place of the run id.
    """
    program = next(_programs)
    lock = threading.Lock()  # protects `occurrences` and `decisions`
    occurrences: dict[int, int] = {}
    decisions = Decisions()

    def emit(partition: Any, record: Any, *arrays: Any) -> None:
        number = int(partition)
        source = _queue_of(platform, devices, number)
        if _holds(consumer, arrays):
            return
        # Each device has its own thread, and all must count and decide alike.
        with lock:
            # Occurrences of a tap that is off are counted too, so that the devices agree when it is on again.
            occurrence = occurrences[number] = occurrences.get(number, -1) + 1
            if consumer.is_check:
                sent = not runtime.rule_table.is_off(consumer, source.device)
            else:
                sent = decisions.of(occurrence, runtime.rule_table.admission(consumer), time.time_ns())
        if not sent:
            return
        numbers = np.array(record, np.int64)
        numbers[0] = occurrence
        specs = [array_types.ArraySpec.of(numbers.dtype, numbers.shape)]
        specs += [array_types.ArraySpec.of(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
        source.emit(
            frame.encode_prefix(consumer.consumer_id, flags, specs),
            [numbers, *_as_emitted(arrays, dtypes)],
            program,
        )
        _end_failing_program(consumer, source.device)

    return emit


def callback_caller(
    platform: str,
    prefix: bytes,
    dtypes: Sequence[np.dtype[Any]],
    results: Sequence[array_types.ArraySpec],
    devices: list[jax.Device] | None,
) -> Callable[..., tuple[np.ndarray[Any, Any], ...]]:
    """Returns the function of `callback_emitter` for a call, whose host function runs after the taps before it.

    The returned function waits for the host function and returns its results, which `results` describe. Elements of
    less than a byte are widened.
    """
    among_native_taps = use_native(platform)

    def ask(partition: Any, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
        name = device_name(_device_of(platform, devices, int(partition)))
        # By name at each call: a forked child or a dead receiver would leave the one of the lowering stale.
        receiver: Any = runtime.receivers([name])[0]
        emitted = _as_emitted(arrays, dtypes)
        if among_native_taps:
            found = receiver.source.call(prefix, emitted, results)
        else:
            found = receiver.calls.ask(prefix, emitted)
        return tuple(result.astype(compat.widened(result.dtype), copy=False) for result in found)

    return ask


_programs = itertools.count(1)


def _device_of(platform: str, devices: list[jax.Device] | None, partition: int) -> jax.Device:
    return (local_devices(platform) if devices is None else devices)[partition]


def _queue_of(platform: str, devices: list[jax.Device] | None, partition: int) -> QueueSource:
    device = _device_of(platform, devices, partition)
    source = _queues.get(device_name(device))
    if source is None:
        raise RuntimeError(f"no receiver runs for device {device_name(device)}")
    return source


def _as_emitted(arrays: Sequence[Any], dtypes: Sequence[np.dtype[Any]]) -> list[np.ndarray[Any, Any]]:
    # XLA passes packed elements (of less than a byte) widened.
    return [np.asarray(a).astype(d, copy=False) for a, d in zip(arrays, dtypes, strict=True)]


def choose_devices(backends: Sequence[str] | None, devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """Returns the given devices, the local devices of some backends, or by default those of all backends in use.

    Raises:
        ValueError: both arguments are given, or a device or backend is not one of this process.
    """
    if backends is not None and devices is not None:
        raise ValueError(
            f"outfeed_receiver got both devices={list(devices)!r} and backends={list(backends)!r}: give one of them"
        )
    if devices is not None:
        chosen = list(devices) if isinstance(devices, Iterable) else [devices]
        wrong = [d for d in chosen if not isinstance(d, jax.Device)]
        if wrong:
            raise ValueError(
                f"devices takes a list of jax.Device, got {devices!r}: such as jax.local_devices()[:2]"
            )
        foreign = [d for d in chosen if d.process_index != jax.process_index()]
        if foreign:
            raise ValueError(
                f"outfeed_receiver got devices of other processes: {foreign}; a process receives from its own "
                "devices: use jax.local_devices()"
            )
    elif backends is not None:
        if isinstance(backends, str):
            raise ValueError(
                f"backends takes a list of platform names, got the string {backends!r}: [{backends!r}]"
            )
        chosen = []
        for backend in backends:
            try:
                chosen += jax.local_devices(backend=backend)
            except RuntimeError as error:
                raise ValueError(
                    f"unknown backend {backend!r}: this process has {jax.default_backend()!r} ({error})"
                ) from error
    else:
        chosen = jax.local_devices()
        # Programs for the CPU run in a GPU's process too (`jax.jit(..., backend="cpu")`, `compute_on`, data
        # pipelines), and their taps would otherwise reach the default receiver, outside of this block's
        # errors and counts.
        if chosen and chosen[0].platform != "cpu":
            chosen += jax.local_devices(backend="cpu")
    if not chosen:
        raise ValueError("outfeed_receiver got no devices: give devices= or backends= that this process has")
    return list(dict.fromkeys(chosen))


MONITORING_PREFIX = "/hostcallback/receiver/"

MONITORING_SCALARS = {
    "messages": "delivered",
    "bytes": "delivered_bytes",
    "dropped": "dropped",
    "failed": "failed",
    "unknown": "unknown",
    "unrecorded": "unrecorded",
}
"""Fields of `DeviceStats`, by the last part of the metric's name in `jax.monitoring`; docs/metrics.md lists them."""


def record_receiver(name: str, rows: Sequence[stats.DeviceStats]) -> None:
    """Reports the statistics of a closed receiver: scalars and a duration per device, and one event."""
    try:
        for row in rows:
            for metric, field in MONITORING_SCALARS.items():
                jax.monitoring.record_scalar(
                    MONITORING_PREFIX + metric, getattr(row, field), device=row.device, receiver=name
                )
            jax.monitoring.record_event_duration_secs(
                MONITORING_PREFIX + "tap_duration", row.tap_sec, device=row.device, receiver=name
            )
        jax.monitoring.record_event(MONITORING_PREFIX + "closed", receiver=name)
    except Exception:  # an error of a listener must not hide the report of the receiver
        logger.exception("a listener of jax.monitoring raised")
