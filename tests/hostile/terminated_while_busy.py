"""A process that SIGTERM finds at an awkward moment: `python terminated_while_busy.py MOMENT FOLDER`.

`flushing`: it emits while the signal's flush is under way, and some of what is flushed fails.
`ending`: Python has ended its other threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.runtime import signals
from hostcallback.receiver.taplog.writing.recorder import Recorder

BURST = 300

moment, folder = sys.argv[1], Path(sys.argv[2])
emitted = 0


def step(number: Any, _: None) -> tuple[Any, None]:
    hcb.id_tap(lambda value: None, number, name="number")
    return number + 1, None


burst = jax.jit(lambda number: lax.scan(step, number, None, BURST)[0]).lower(jnp.int32(0)).compile()


def emit() -> None:
    """Emits the next numbers, and notes how many there are by now."""
    global emitted
    emitted = int(burst(jnp.int32(emitted)).block_until_ready())
    (folder / "emitted").write_text(str(emitted))


def emitting_after(cls: Any) -> None:
    """Makes the first drain of an object emit when it has ended."""
    drain, first = cls.drain, [True]

    def call(self: Any, timeout_sec: float) -> Any:
        found = drain(self, timeout_sec)
        if first:
            first.clear()
            emit()
        return found

    cls.drain = call


class Fails:
    """Cannot be flushed."""

    def drain(self, timeout_sec: float) -> bool:
        """Raises."""
        raise OSError("no space left")


class Ends:
    """Ends while Python does."""

    def __init__(self) -> None:
        """Keeps what it needs, because modules are gone by then."""
        self.needs = os.kill, os.getpid(), signal.SIGTERM, folder / "went on", sum, range(50_000_000)

    def __del__(self) -> None:
        """Sends the signal, and goes on for a while."""
        kill, pid, number, path, add, numbers = self.needs
        kill(pid, number)
        add(numbers)
        path.touch()


def main() -> None:
    """Runs until the signal."""
    pause = threading.Event()
    signals.GRACE_SEC = 0.3
    forward = hcb.Forward("localhost:1", spool=folder / "spool", drain_sec=0.0)
    with hcb.outfeed_receiver(record=folder / "log", forward=forward):
        emit()
        if moment == "flushing":
            emitting_after(Recorder)
            emitting_after(Forwarder)
            failing = [Fails() for _ in range(20)]
            for item in failing:
                signals.watch_termination.add(item)
            os.kill(os.getpid(), signal.SIGTERM)
            pause.wait(60)
    sys.modules["ends"] = Ends()  # type: ignore[assignment]


main()
