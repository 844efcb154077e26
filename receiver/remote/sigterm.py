"""SIGTERM, as before a preemption: what was emitted is written and sent first, whoever else handles the signal.

The handler is native, because JAX's own is: `jax.distributed.initialize` replaces the handler that it finds. Ours calls
the one it stands before, and stands before it again when it has been replaced.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from receiver.log import logger
from receiver.native import bindings as native_library

LOOK_SEC = 0.5
"""How often is looked whether somebody has replaced the handler."""

GRACE_SEC = 5.0
"""How long the collector may take to acknowledge what it is sent then."""


class Drains(Protocol):
    """What is flushed."""

    def drain(self, timeout_sec: float) -> bool:
        """Writes what has come and waits until it is stored elsewhere; whether it is in that time."""


class SigtermFlusher:
    """The thread that flushes. Once begun, it goes on as long as the process.

    Attributes:
        deliver: waits until what was emitted has been read, for so many seconds at most.
    """

    def __init__(self) -> None:
        """Nothing is watched."""
        self.deliver: Callable[[float], Any] = lambda timeout_sec: None
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()  # protects what follows
        self._flushed: weakref.WeakSet[Drains] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, flushed: Drains) -> None:
        """Has it flushed at SIGTERM while it lives; does nothing where the native library cannot be loaded."""
        if not native_library.available():
            return
        with self._lock:
            self._flushed.add(flushed)
            if self._thread is not None:
                return
            read, write = os.pipe()
            os.set_blocking(write, False)  # a full one has been heard of
            ends = native_library.load().hcb_watch_termination(write)
            self._thread = threading.Thread(
                target=self._run, args=(read, write, ends), name="hostcallback-sigterm", daemon=True
            )
            self._thread.start()

    def remove(self, flushed: Drains) -> None:
        """It needs no flushing any more."""
        with self._lock:
            self._flushed.discard(flushed)

    def after_fork_in_child(self) -> None:
        """The child has no such thread."""
        if self._thread is not None:
            native_library.load().hcb_unwatch_termination()
        self._forget()

    def _run(self, read: int, write: int, ends: int) -> None:
        library = native_library.load()
        while True:
            ready, _, _ = select.select([read], [], [], LOOK_SEC)
            if ready:
                os.read(read, 4096)
                self._flush()
                if ends:  # nobody else handles it: the process ends, as it would have
                    library.hcb_unwatch_termination()
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            ends = library.hcb_watch_termination(write)

    def _flush(self) -> None:
        with self._lock:
            flushed = list(self._flushed)
        try:
            if flushed:
                self.deliver(GRACE_SEC)
            for item in flushed:
                item.drain(GRACE_SEC)
        except Exception:  # whatever it is, the signal is to have its effect
            logger.exception("at SIGTERM not everything could be forwarded")


watch = SigtermFlusher()
"""This process's."""

os.register_at_fork(after_in_child=watch.after_fork_in_child)
