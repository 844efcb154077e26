"""What SIGTERM flushes: recorders and forwarders. `receiver/runtime/sigterm.py` has the handler."""

from __future__ import annotations

from time import perf_counter

from hostcallback.receiver.runtime import sigterm
from hostcallback.receiver.runtime.runtime import runtime


def flush_at_termination(flushed: sigterm.Drains) -> None:
    """Registers `flushed`: at SIGTERM the emitted messages are delivered and `flushed` is drained."""
    sigterm.watch.deliver = _deliver
    sigterm.watch.add(flushed)


def end_flushing(flushed: sigterm.Drains) -> None:
    """Unregisters `flushed`."""
    sigterm.watch.remove(flushed)


def _deliver(timeout_sec: float) -> None:
    runtime.wait_delivered(deadline=perf_counter() + timeout_sec)
