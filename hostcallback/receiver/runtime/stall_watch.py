"""The supervisor thread, which logs the slow tap that a stalled device waits for."""

from __future__ import annotations

import ctypes
import threading
from time import perf_counter

from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native
from hostcallback.receiver.runtime.runtime import Runtime

WARN_AFTER_SEC = 2.0
"""Seconds that a device waits for one tap invocation before the supervisor logs a warning."""

REPEAT_SEC = 30.0
"""Seconds between two warnings about the same device."""


class Supervisor:
    """Thread that sleeps in the native library until an emission has to wait. It uses no CPU while idle."""

    def __init__(self, runtime: Runtime) -> None:
        """Starts the daemon thread."""
        self._library = native.load()
        self._runtime = runtime
        self._thread = threading.Thread(target=self._run, name="hostcallback-supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        event = native.Event()
        while True:
            if not self._library.hcb_supervise_wait(-1, ctypes.byref(event)):
                continue
            if event.kind == native.EVENT_NOT_PINNED:
                logger.warning(
                    "the GPU driver could not pin memory for the taps of GPU %d: their copies go through pageable "
                    "memory, which is slower; free host memory, raise the limit of locked memory (ulimit -l), or give "
                    "taps less (HOSTCALLBACK_RING_BYTES, HOSTCALLBACK_BLOCK_BUDGET_BYTES)",
                    self._library.hcb_gpu_ring(event.device),  # its own inverse
                )
            elif event.kind == native.EVENT_STALL:
                try:
                    self._watch()
                except Exception:
                    logger.exception("the supervisor could not look at the stall of device %d", event.device)

    def _watch(self) -> None:
        """Logs slow taps until no emission waits for room."""
        reported: dict[str, float] = {}
        pause = threading.Event()
        while True:
            waiting = [r for r in self._runtime.receivers() if r.source.counters().waiting_producers]
            if not waiting:
                return
            for receiver in waiting:
                running = receiver.running_tap()
                now = perf_counter()
                recently = now - reported.get(receiver.name, -REPEAT_SEC) < REPEAT_SEC
                if running is not None and running[1] > WARN_AFTER_SEC and not recently:
                    reported[receiver.name] = now
                    logger.warning("the device waits for a slow tap: %s", receiver.describe_wait())
            pause.wait(WARN_AFTER_SEC / 4)
