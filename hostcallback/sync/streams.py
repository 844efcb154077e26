"""Sentinels, which wait for the programs that known threads have dispatched to CPU devices.

XLA:CPU runs the programs of one execution stream in the order of their dispatch on each device, and a thread's stream
has a number that follows from its ident. A *sentinel* is a trivial program in the stream of a thread. It ends after all
programs that this thread dispatched to the device before, even if their results were dropped. Programs for several
devices have a separate order over all threads; a sentinel for several devices ends after all of them.

Sentinels are dispatched for a waiting thread and for receiver threads. They must not be dispatched for a thread that
may dispatch at the same time: XLA reads and writes a stream's last program in two steps, so one of the two programs
could drop out of the order. (A receiver thread may do so if tap functions dispatch; the order of their programs is not
guaranteed.)
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import hold
from hostcallback.sync.dispatch_thread import DispatchError, dispatch_thread

LOOK_SEC = 0.005
"""Seconds between the calls of `look` while waiting for the dispatch thread."""
PAUSE_SEC = 20e-6
MOST_PAUSE_SEC = 2e-3
MOST_PENDING = 4
"""Number of a device's 32 places that sentinels of all barriers take at a time. Dispatches of tap functions need a
place too, while the programs that wait for these tap functions keep theirs."""
TRIAL_SEC = 1.0
MOST_TRIALS = 3
"""Number of trials of `are_known`: a fence of another barrier can spoil one."""

Key = tuple[int | None, tuple[jax.Device, ...]]
"""Key of a sentinel: the thread's ident and the device, or None and several devices."""

_pending: dict[
    Key, Any
] = {}  # results of sentinels that did not end at once; only the dispatch thread uses it


class Sentinels:
    """The sentinels of one barrier."""

    def __init__(self, devices: Iterable[jax.Device], threads: Iterable[int], *, several: bool) -> None:
        """Dispatches nothing yet.

        Args:
            devices: CPU devices of this process.
            threads: idents of the threads whose programs to wait for.
            several: whether programs for several devices may run.
        """
        self._missing: list[Key] = [(ident, (device,)) for ident in threads for device in devices]
        if several:
            # Two devices are enough: programs over several devices have one stream of their own for all of
            # them.
            self._missing.append((None, tuple(jax.local_devices(backend="cpu")[:2])))
        self._results: list[Any] = []
        self._failure: BaseException | None = None

    def wait(self, look: Callable[[], None]) -> None:
        """Dispatches the sentinels and waits for them.

        Args:
            look: called repeatedly while waiting; may raise to stop the wait.

        Raises:
            NoThreadError: the interpreter is shutting down.
            DispatchError: a program could not be dispatched.
        """
        pause = PAUSE_SEC
        while self._missing or self._results:
            if self._missing:
                self._dispatch_missing(look)
            # Polls, because a blocking wait would ignore Ctrl-C and the deadline.
            self._results = [result for result in self._results if not result.is_ready()]
            if self._missing or self._results:
                look()
                time.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_SEC)

    def _dispatch_missing(self, look: Callable[[], None]) -> None:
        done = threading.Event()

        def dispatch() -> None:
            try:
                self._missing = [key for key in self._missing if not self._dispatch(key)]
            except BaseException as error:
                self._failure = error
            finally:
                done.set()

        dispatch_thread.submit(dispatch)
        while not done.wait(LOOK_SEC):
            look()
        if self._failure is not None:
            raise DispatchError("a program of a barrier could not be run") from self._failure

    def _dispatch(self, key: Key) -> bool:
        # A pending sentinel of another barrier cannot be reused, because programs may have been dispatched after it.
        for place in [place for place, result in _pending.items() if result.is_ready()]:
            del _pending[place]
        if key in _pending or len(_pending) >= MOST_PENDING or (_pending and runtime.holds_programs()):
            return False
        ident, devices = key
        program, operand = sentinel_program(devices)
        if ident is None:
            result = program(operand)
        else:
            with compat.execution_stream(ident):
                result = program(operand)
        if not result.is_ready():
            _pending[key] = result
            self._results.append(result)
        return True


@functools.cache
def sentinel_program(devices: tuple[jax.Device, ...]) -> tuple[Callable[[Any], Any], Any]:
    """Returns a trivial program for these devices, and its operand."""
    # Compiled ahead of time, so that it is not traced again under the user's settings of JAX.
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        mesh = jax.sharding.Mesh(np.array(devices), ("device",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        operand = jax.device_put(np.zeros(len(devices), np.uint8), sharding)
        return jax.jit(lambda x: x + np.uint8(1)).lower(operand).compile(), operand


def prepare(devices: Iterable[jax.Device]) -> None:
    """Compiles the programs of barriers on the dispatch thread, without waiting for it.

    Raises:
        NoThreadError: the interpreter is shutting down.
    """

    def compile_all() -> None:
        for device in devices:
            sentinel_program((device,))
        hold.held_program(jax.local_devices(backend="cpu")[0])

    dispatch_thread.submit(compile_all)


class _Trials:
    known = False
    ended = 0


def are_known(look: Callable[[], None]) -> bool:
    """Whether programs can be dispatched to another thread's stream here. The dispatch thread tries it once.

    Args:
        look: as in `Sentinels.wait`.

    Raises:
        NoThreadError: the interpreter is shutting down.
    """
    if _Trials.known or _Trials.ended >= MOST_TRIALS:
        return _Trials.known
    tried = threading.Event()

    def try_streams() -> None:
        try:
            if not _Trials.known:
                _Trials.known = _try_streams()
                _Trials.ended += 1
        finally:
            tried.set()

    dispatch_thread.submit(try_streams)
    begun = perf_counter()
    while not tried.wait(LOOK_SEC):
        look()
        if perf_counter() - begun > TRIAL_SEC:
            hold.end()  # the program runs on the dispatch thread, which it blocks
    return _Trials.known


def _try_streams() -> bool:
    (device, *_) = jax.local_devices(backend="cpu")
    dispatch_held, (program, operand) = hold.held_program(device), sentinel_program((device,))
    hold.begin()
    try:
        held = dispatch_held()
        with compat.execution_stream(threading.get_ident()):
            behind = program(operand)
        with compat.execution_stream(0):
            beside = program(operand)
        # Only while `held` is held: then the program in its stream must wait, and that in another must not.
        return beside.is_ready() and not behind.is_ready() and not held.is_ready()
    finally:
        hold.end()


def forget() -> None:
    """Drops compiled programs and pending sentinels, for a forked child."""
    sentinel_program.cache_clear()
    _pending.clear()


processes.in_child(processes.Stage.PROGRAM, forget)
