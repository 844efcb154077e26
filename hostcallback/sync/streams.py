"""Waits behind the programs that known threads dispatched to CPU devices.

XLA:CPU runs the programs of one execution stream in the order of their dispatch on each device, and a thread's stream
has a number that follows from its ident. So a trivial program that is dispatched to the stream of a thread, a
*sentinel*, ends when all that this thread dispatched to the device before is over, whatever has become of the results.
Programs for several devices have an order of their own, over all threads: a sentinel of that kind ends behind them.

A sentinel is dispatched for a thread that waits, and for receivers' threads. It must not be for a thread that may
dispatch at the same time: XLA reads and writes a stream's last program in two steps, so one of the two could drop out
of the order. (A receiver's thread might, where tap functions dispatch; what they dispatch is in no promised order.)
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
from hostcallback.receiver import fork
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import hold
from hostcallback.sync.dispatch_thread import DispatchError, dispatch_thread

LOOK_SEC = 0.005
"""How often one who waits looks whether to give up."""
PAUSE_SEC = 20e-6
MOST_PAUSE_SEC = 2e-3
MOST_PENDING = 4
"""Places of a device that sentinels of all barriers take at a time, of the 32 that there are: what a tap function
dispatches needs one, and the programs that it holds up keep theirs."""
TRIAL_SEC = 1.0
MOST_TRIALS = 3
"""A fence of another barrier can spoil a trial."""

Key = tuple[int | None, tuple[jax.Device, ...]]
"""A sentinel's place: the thread's ident and the device, or None and several."""

_pending: dict[Key, Any] = {}  # results of sentinels that were not over at once; the dispatch thread's


class Sentinels:
    """Those of one barrier."""

    def __init__(self, devices: Iterable[jax.Device], threads: Iterable[int], *, several: bool) -> None:
        """Dispatches nothing yet.

        Args:
            devices: this process's CPU devices.
            threads: idents of those whose programs to wait for.
            several: programs for several devices may run.
        """
        self._missing: list[Key] = [(ident, (device,)) for ident in threads for device in devices]
        if several:
            self._missing.append((None, tuple(jax.local_devices(backend="cpu")[:2])))
        self._results: list[Any] = []
        self._failure: BaseException | None = None

    def wait(self, look: Callable[[], None]) -> None:
        """Dispatches the sentinels, and waits for them.

        Args:
            look: called now and then; may raise to give up.

        Raises:
            NoThreadError: the interpreter ends.
            DispatchError: a program could not be dispatched.
        """
        pause = PAUSE_SEC
        while self._missing or self._results:
            if self._missing:
                self._dispatch_missing(look)
            # Polled, not blocked on: blocking would shut out Ctrl-C and the deadline.
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
        # One that is still pending is none of this barrier's: programs may have been dispatched behind it.
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
    """A trivial program for these devices, and its operand."""
    # Compiled beforehand: under whatever settings of the user's it runs, it is not traced again.
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        mesh = jax.sharding.Mesh(np.array(devices), ("device",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        operand = jax.device_put(np.zeros(len(devices), np.uint8), sharding)
        return jax.jit(lambda x: x + np.uint8(1)).lower(operand).compile(), operand


def prepare(devices: Iterable[jax.Device]) -> None:
    """Compiles what barriers dispatch, on the dispatch thread; does not wait for it.

    Raises:
        NoThreadError: the interpreter ends.
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
    """Whether programs can be dispatched to another thread's stream here: tried once, on the dispatch thread.

    Args:
        look: as for `Sentinels.wait`.

    Raises:
        NoThreadError: the interpreter ends.
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
            hold.end()  # a program runs where it is dispatched, and is held there
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
        return beside.is_ready() and not behind.is_ready() and not held.is_ready()
    finally:
        hold.end()


def forget() -> None:
    """Forgets compiled programs and those that run: for a forked child."""
    sentinel_program.cache_clear()
    _pending.clear()


fork.in_child(fork.Stage.PROGRAM, forget)
