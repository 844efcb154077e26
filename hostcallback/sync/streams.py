"""Waits behind the programs that known threads dispatched to CPU devices.

XLA:CPU runs the programs of one execution stream in the order of their dispatch on each device, and a thread's stream
has a number that follows from its ident. So a trivial program that is dispatched to the stream of a thread ends when
all that this thread dispatched to the device before is over, whatever has become of the results. Programs for several
devices have an order of their own, over all threads: a trivial one of that kind ends behind them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.sync import hold
from hostcallback.sync.dispatch_thread import DispatchError, dispatch_thread
from hostcallback.sync.dispatching_threads import Census

LOOK_SEC = 0.005
"""How often one who waits looks whether to give up."""
PAUSE_SEC = 20e-6
MOST_PAUSE_SEC = 2e-3
MOST_PENDING = 8
"""Places of a device that one barrier takes at a time, of the 32 that there are."""
TRIAL_SEC = 1.0
MOST_TRIALS = 3
"""A fence of another barrier can spoil a trial."""


class Sentinels:
    """The trivial programs of one barrier, which end when all programs before them are over."""

    def __init__(self, devices: Sequence[jax.Device], threads: Census, *, several: bool) -> None:
        """Dispatches nothing yet.

        Args:
            devices: this process's CPU devices.
            threads: whose programs to wait for; all suspects are known.
            several: programs for several devices may run.
        """
        self._devices, self._threads, self._several = devices, threads, several
        self._dispatched = threading.Event()
        self._pending: list[Any] = []
        self._failure: BaseException | None = None
        self._given_up = False

    def wait(self, look: Callable[[], None]) -> None:
        """Dispatches the programs, and waits for them.

        Args:
            look: called now and then; may raise to give up.

        Raises:
            NoThreadError: the interpreter ends.
            DispatchError: a program could not be dispatched.
        """
        dispatch_thread.submit(self._dispatch)
        try:
            while not self._dispatched.wait(LOOK_SEC):
                look()
            if self._failure is not None:
                raise DispatchError("a program of a barrier could not be run") from self._failure
            self._wait_until_pending(0, look)
        finally:
            self._given_up = True

    def _dispatch(self) -> None:
        try:
            if self._several:
                self._add(_sentinel(tuple(jax.local_devices(backend="cpu")[:2])))
            for ident in self._threads.suspects or ():
                with compat.execution_stream(ident):
                    for device in self._devices:
                        self._add(_sentinel((device,)))
                self._wait_until_pending(MOST_PENDING, lambda: None)
                if self._given_up:
                    return
        except BaseException as error:
            self._failure = error
        finally:
            self._dispatched.set()

    def _add(self, sentinel: tuple[Callable[[Any], Any], Any]) -> None:
        program, operand = sentinel
        result = program(operand)
        if not result.is_ready():
            self._pending.append(result)

    def _wait_until_pending(self, count: int, look: Callable[[], None]) -> None:
        # Polled, not blocked on: blocking would shut out Ctrl-C and the deadline.
        pause = PAUSE_SEC
        while len(self._pending) > count and not self._given_up:
            look()
            time.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SEC)
            self._pending = [result for result in self._pending if not result.is_ready()]


@functools.cache
def _sentinel(devices: tuple[jax.Device, ...]) -> tuple[Callable[[Any], Any], Any]:
    # Compiled beforehand: under whatever settings of the user's it runs, it is not traced again.
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        operand = np.zeros(len(devices), np.uint8)
        mesh = jax.sharding.Mesh(np.array(devices), ("device",))
        operand = jax.device_put(
            operand, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        )
        return jax.jit(lambda x: x + np.uint8(1)).lower(operand).compile(), operand


def prepare(devices: Iterable[jax.Device]) -> None:
    """Compiles what barriers dispatch, on the dispatch thread; does not wait for it.

    Raises:
        NoThreadError: the interpreter ends.
    """

    def compile_all() -> None:
        for device in devices:
            _sentinel((device,))
        hold.held_program(jax.local_devices(backend="cpu")[0])

    dispatch_thread.submit(compile_all)


def are_known(look: Callable[[], None]) -> bool:
    """Whether programs can be dispatched to another thread's stream here: tried once, on the dispatch thread.

    Args:
        look: as for `Sentinels.wait`.

    Raises:
        NoThreadError: the interpreter ends.
    """
    global _known, _trials
    if _known or _trials >= MOST_TRIALS:
        return _known
    _trials += 1
    tried = threading.Event()
    found: list[bool] = []

    def try_streams() -> None:
        try:
            found.append(_try_streams())
        finally:
            tried.set()

    dispatch_thread.submit(try_streams)
    begun = perf_counter()
    while not tried.wait(LOOK_SEC):
        look()
        if perf_counter() - begun > TRIAL_SEC:
            hold.end()  # a program runs where it is dispatched, and is held there
    _known = _known or found == [True]
    return _known


def _try_streams() -> bool:
    (device, *_) = jax.local_devices(backend="cpu")
    dispatch_held, (program, operand) = hold.held_program(device), _sentinel((device,))
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


_known = False
_trials = 0


def forget() -> None:
    """Forgets compiled programs: for a forked child."""
    _sentinel.cache_clear()
