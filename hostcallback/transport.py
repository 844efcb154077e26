"""Which way a platform's taps take to the host, and the start of its receivers."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from receiver import native_library
from receiver.errors import NativeLibraryError
from receiver.log import logger
from receiver.queue_source import QueueSource
from receiver.ring_source import RingConfig, RingSource
from receiver.runtime import runtime
from receiver.source import Source
from receiver.supervisor import Supervisor

FFI_TARGET = "hostcallback_tap"
TRANSPORT_VARIABLE = "HOSTCALLBACK_TRANSPORT"
NATIVE_PLATFORMS = ("cpu",)

_lock = threading.Lock()  # protects _started and the queue sources
_started: set[str] = set()
_queues: dict[str, QueueSource] = {}
_supervisor: Supervisor | None = None


def device_name(device: jax.Device) -> str:
    """How a device is called in reports: `cpu:0`."""
    return f"{device.platform}:{device.id}"


@functools.cache
def use_native(platform: str) -> bool:
    """Whether the platform's taps go through the native handler; otherwise through Python callbacks.

    Raises:
        ValueError: `HOSTCALLBACK_TRANSPORT` holds neither `native` nor `callback`.
        NativeLibraryError: it holds `native` and the library cannot be loaded.
    """
    choice = os.environ.get(TRANSPORT_VARIABLE, "").strip().lower()
    if choice not in ("", "native", "callback"):
        raise ValueError(f"{TRANSPORT_VARIABLE}={choice!r}: expected 'native', 'callback' or nothing")
    if platform not in NATIVE_PLATFORMS or choice == "callback":
        return False
    try:
        native_library.load()
    except NativeLibraryError as error:
        if choice == "native":
            raise
        logger.warning("taps use the slower callback transport: %s", error)
        return False
    return True


def start(platform: str) -> None:
    """Starts the receivers of the platform's local devices unless they run. Any thread."""
    global _supervisor
    with _lock:
        if platform in _started:
            return
        native = use_native(platform)
        if native:
            _register_handler(platform)
            _supervisor = _supervisor or Supervisor(runtime)
        for device in local_devices(platform):
            make_source = functools.partial(_make_source, device, native)
            runtime.start(device_name(device), device, make_source)
        _started.add(platform)


def started() -> bool:
    """Whether any receiver runs."""
    return bool(_started)


def local_devices(platform: str) -> list[jax.Device]:
    """This process's devices of a platform; none where the platform has no backend here."""
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # lowered for a platform that this machine does not have
        return []


def forget() -> None:
    """Forgets what runs: for a forked child."""
    global _lock, _supervisor
    _supervisor = None
    _lock = threading.Lock()
    _started.clear()
    _queues.clear()


def _make_source(device: jax.Device, native: bool) -> Source:
    if native:
        return RingSource.open(device.id, RingConfig.from_environment())
    source = _queues.get(device_name(device))
    if source is None:
        source = _queues[device_name(device)] = QueueSource(device.id)
    return source


@functools.cache
def _register_handler(platform: str) -> None:
    # Not at import: a registration before the backend exists would be reported as a backend failure.
    library = native_library.load()
    jax.ffi.register_ffi_target(FFI_TARGET, jax.ffi.pycapsule(library.hcb_tap), platform=platform)


def callback_emitter(
    platform: str, prefix: bytes, dtypes: Sequence[np.dtype[Any]], devices: list[jax.Device] | None
) -> Callable[..., tuple[()]]:
    """The Python function that a tapped program calls where there is no native handler.

    It takes the partition's index and the tapped arrays, and puts a frame into the queue of the device that
    runs it.
    """

    def emit(partition: Any, *arrays: Any) -> tuple[()]:
        known = local_devices(platform) if devices is None else devices
        device = known[int(partition)]
        source = _queues.get(device_name(device))
        if source is None:
            raise RuntimeError(f"no receiver runs for device {device_name(device)}")
        source.emit(
            prefix, [np.asarray(a).astype(d, copy=False) for a, d in zip(arrays, dtypes, strict=True)]
        )
        return ()

    return emit
