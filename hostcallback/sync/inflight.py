"""Waits for the dispatched programs with taps, of any thread, that may still run.

Decides by which means: sentinels in the threads' streams, a fence around a CPU device, or JAX's live arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from time import perf_counter, sleep
from typing import Any

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.errors import TapTimeoutError
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime import device_receiver
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import fence, streams
from hostcallback.sync.dispatch_thread import DispatchError, NoThreadError, dispatch_thread
from hostcallback.sync.dispatching_threads import DispatchingThreads

_devices: set[jax.Device] = set()  # local devices for which a program with taps was compiled
_several = False  # whether such a program was compiled for several CPU devices
_threads: DispatchingThreads | None = None  # set when the first one is compiled for a CPU device
_asynchronous = True  # whether XLA:CPU dispatched asynchronously when the first one was compiled


def expect(devices: Iterable[jax.Device]) -> None:
    """Notes that a program with taps may run on these devices from now on."""
    global _several, _threads, _asynchronous
    here = jax.process_index()
    local = {device for device in devices if device.process_index == here}
    cpus = {device for device in local if device.platform == "cpu"}
    _several = _several or len(cpus) > 1
    if cpus and native_library.available():
        # Starts the thread now, because Python starts no threads at exit, when the last messages are waited for.
        with contextlib.suppress(NoThreadError):
            dispatch_thread.start()
            if new := cpus - _devices:
                streams.prepare(new)
        if _threads is None:
            _asynchronous = compat.dispatches_asynchronously()
            _threads = DispatchingThreads()
    _devices.update(local)


def wait(
    deadline: float | None, check: Callable[[], None], devices: Collection[jax.Device] | None = None
) -> None:
    """Waits for all programs with taps that any thread dispatched before this call.

    Does not raise the errors of failed programs: code that uses their results gets them.

    Args:
        deadline: `perf_counter()` value at which to give up; None for never.
        check: called repeatedly while waiting; may raise to stop the wait.
        devices: the devices whose programs to wait for; all by default.

    Raises:
        TapTimeoutError: the deadline passed.
    """
    devices = _devices.copy() if devices is None else _devices.intersection(devices)
    _wait(devices, _looking(deadline, check), _wait_on_cpus)


def dispatched_by_tap_functions() -> object:
    """Returns a value that is equal to an earlier one only if no tap function has dispatched a program in between."""
    return _dispatched if _are_noticed else runtime.progress()


def wait_for_tap_functions(deadline: float | None, check: Callable[[], None]) -> None:
    """Waits for the programs that tap functions have dispatched since `wait`, with its arguments and exceptions."""
    _wait(_devices.copy(), _looking(deadline, check), _wait_for_receivers)


_dispatched = (
    0  # how many programs receiver threads have dispatched, or a bit more or less: only a change counts
)
_are_noticed = True  # whether JAX tells of them


def _note_dispatch() -> None:
    global _dispatched
    _dispatched += 1


def _notice_dispatches() -> None:
    global _are_noticed
    try:
        compat.notice_dispatches(_note_dispatch)
    except LookupError as error:
        _are_noticed = False
        logger.debug("each barrier that delivers waits twice, since this JAX is not known: %s", error)


device_receiver.at_start(_notice_dispatches)


Look = Callable[[], None]


def _looking(deadline: float | None, check: Callable[[], None]) -> Look:
    def look() -> None:
        check()
        if deadline is not None and perf_counter() > deadline:
            raise TapTimeoutError(
                "dispatched computations were still running when the time was up: give more time (timeout_sec=), or "
                "look for a computation that does not end"
            )

    return look


def _wait(
    devices: Collection[jax.Device], look: Look, on_cpus: Callable[[Sequence[jax.Device], Look], None]
) -> None:
    cpus = [device for device in devices if device.platform == "cpu"]
    others = [device for device in devices if device.platform != "cpu"]
    if others:
        _wait_behind(others, look)
    if cpus:
        try:
            on_cpus(cpus, look)
        except (NoThreadError, _UnknownError):
            _wait_all(jax.live_arrays(), look)


class _UnknownError(RuntimeError):
    """The programs dispatched by other threads cannot be found."""


def _wait_on_cpus(devices: Sequence[jax.Device], look: Look) -> None:
    if _threads is None:
        raise _UnknownError
    threads = _threads.count()
    suspects, complete = threads.suspects, True
    try:
        if not _asynchronous:
            # A program has ended when its call returns, except if it waits for a result of a program over several
            # devices.
            streams.Sentinels(devices, suspects or {get_ident()}, several=_several).wait(look)
        # A program that waits for a host function may run on the thread that dispatches it, and is in no stream yet.
        elif suspects is not None and not runtime.holds_programs() and streams.are_known(look):
            streams.Sentinels(devices, suspects, several=_several).wait(look)
        else:
            # First waits for all live results. These are not all programs, but this wait takes no places from others.
            _wait_all(jax.live_arrays(), look)
            complete = fence.fence.wait(devices, look)
    except DispatchError as error:
        logger.exception("a barrier could not find out what runs")
        raise _UnknownError from error
    # Only then are all threads' programs over, on all devices: otherwise the next barrier would trust too
    # much.
    if complete and _devices.issubset(devices):
        _threads.waited(threads)


def _wait_for_receivers(devices: Sequence[jax.Device], look: Look) -> None:
    if _threads is None or (_asynchronous and not streams.are_known(look)):
        raise _UnknownError
    threads = {receiver.thread.ident for receiver in runtime.receivers()}
    try:
        streams.Sentinels(devices, (ident for ident in threads if ident), several=_several).wait(look)
    except DispatchError as error:
        logger.exception("a barrier could not find out what tap functions dispatched")
        raise _UnknownError from error


def _wait_behind(devices: Sequence[jax.Device], look: Callable[[], None]) -> None:
    # On each of these devices programs end in the order of their dispatch, over all threads.
    last = []
    for device in devices:
        program, operand = streams.sentinel_program((device,))
        last.append(program(operand))
    _wait_all(last, look)


def _wait_all(arrays: Sequence[Any], look: Callable[[], None]) -> None:
    # Polls, because a blocking wait would ignore Ctrl-C and the deadline.
    for array in arrays:
        pause = 20e-6
        while not _is_ready(array):
            look()
            sleep(pause)
            pause = min(2 * pause, 2e-3)


def _is_ready(array: Any) -> bool:
    try:
        return bool(array.is_deleted() or array.is_ready())
    except RuntimeError:  # another thread deleted the array between the two calls
        return True


def forget() -> None:
    """Drops all state, for a forked child, in which no program runs: the parent has XLA's threads."""
    global _threads
    _devices.clear()
    _threads = None


processes.in_child(processes.Stage.PROGRAM, forget)
