"""Waits for the dispatched programs with taps that may still run, by sentinels in the streams of known threads.

Decides by which means: sentinels in the threads' streams, a fence around a CPU device, or JAX's live arrays.

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

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from time import perf_counter, sleep
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver import errors, processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime import device_receiver
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.sync import fence, threads
from hostcallback.sync.threads import DispatchError, DispatchingThreads, NoThreadError, dispatch_thread

LOOK_SEC = 0.005
"""Seconds between the calls of `look` while waiting for the dispatch thread."""
PAUSE_SEC = 20e-6
MAX_PAUSE_SEC = 2e-3
MAX_PENDING = 4
"""Number of a device's 32 slots that sentinels of all barriers take at a time. Dispatches of tap functions need a
slot too, while the programs that wait for these tap functions keep theirs."""
TRIAL_SEC = 1.0
MAX_TRIALS = 3
"""Number of trials of `are_known`: a fence of another barrier can spoil one."""

Look = Callable[[], None]
"""Called repeatedly while waiting; may raise to stop the wait."""

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

    def wait(self, look: Look) -> None:
        """Dispatches the sentinels and waits for them.

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
                sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SEC)

    def _dispatch_missing(self, look: Look) -> None:
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
        for ended in [key for key, result in _pending.items() if result.is_ready()]:
            del _pending[ended]
        if key in _pending or len(_pending) >= MAX_PENDING or (_pending and runtime.holds_programs()):
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
        place: Any = devices[0]
        if len(devices) > 1:
            mesh = jax.sharding.Mesh(np.array(devices), ("device",))
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        operand = jax.device_put(np.zeros(len(devices), np.uint8), place)
        return jax.jit(threads.barrier_copy).lower(operand).compile(), operand


def prepare(devices: Iterable[jax.Device]) -> None:
    """Compiles the programs of barriers on the dispatch thread, without waiting for it.

    Raises:
        NoThreadError: the interpreter is shutting down.
    """

    def compile_all() -> None:
        for device in devices:
            sentinel_program((device,))
        threads.held_program(jax.local_devices(backend="cpu")[0])

    dispatch_thread.submit(compile_all, compiles=True)


class _Trials:
    known = False
    ended = 0


def are_known(look: Look) -> bool:
    """Whether programs can be dispatched to another thread's stream here. The dispatch thread tries it once.

    Raises:
        NoThreadError: the interpreter is shutting down.
    """
    if _Trials.known or _Trials.ended >= MAX_TRIALS:
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
            threads.end()  # the program runs on the dispatch thread, which it blocks
    return _Trials.known


def _try_streams() -> bool:
    (device, *_) = jax.local_devices(backend="cpu")
    dispatch_held, (program, operand) = threads.held_program(device), sentinel_program((device,))
    threads.begin()
    try:
        held = dispatch_held()
        with compat.execution_stream(threading.get_ident()):
            behind = program(operand)
        with compat.execution_stream(0):
            beside = program(operand)
        # Only while `held` is held: then the program in its stream must wait, and that in another must not.
        return beside.is_ready() and not behind.is_ready() and not held.is_ready()
    finally:
        threads.end()


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
    if local <= _devices:
        return
    if cpus and native_library.available():
        # Starts the thread now, because Python starts no threads at exit, when the last messages are waited for.
        with contextlib.suppress(NoThreadError):
            dispatch_thread.start()
            prepare(cpus - _devices)
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
    threads = [receiver.thread.ident for receiver in runtime.receivers()]
    _wait(_devices.copy(), _looking(deadline, check), functools.partial(_wait_for_threads, threads))


def wait_for_this_thread() -> None:
    """Waits for the programs with taps that this thread dispatched before this call.

    Waits for those of all threads on devices other than CPUs, where they are for several devices, and where it is not
    known what a thread dispatched.
    """
    threads = [threading.get_ident()]
    _wait(_devices.copy(), lambda: None, functools.partial(_wait_for_threads, threads))


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


def _looking(deadline: float | None, check: Callable[[], None]) -> Look:
    def look() -> None:
        check()
        if deadline is not None and perf_counter() > deadline:
            raise errors.TapTimeoutError(
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
            Sentinels(devices, suspects or {threading.get_ident()}, several=_several).wait(look)
        # A program that waits for a host function may run on the thread that dispatches it, and is in no stream yet.
        elif suspects is not None and not runtime.holds_programs() and are_known(look):
            Sentinels(devices, suspects, several=_several).wait(look)
        else:
            # First waits for all live results. These are not all programs, but this wait takes no slots from others.
            _wait_all(jax.live_arrays(), look)
            complete = fence.fence.wait(devices, look)
    except DispatchError as error:
        logger.exception("a barrier could not find out what runs")
        raise _UnknownError from error
    # Only then are all threads' programs over, on all devices: otherwise the next barrier would trust too
    # much.
    if complete and _devices.issubset(devices):
        _threads.waited(threads)


def _wait_for_threads(threads: Iterable[int | None], devices: Sequence[jax.Device], look: Look) -> None:
    if _threads is None or (_asynchronous and not are_known(look)):
        raise _UnknownError
    try:
        Sentinels(devices, {ident for ident in threads if ident}, several=_several).wait(look)
    except DispatchError as error:
        logger.exception("a barrier could not find out what a thread dispatched")
        raise _UnknownError from error


def _wait_behind(devices: Sequence[jax.Device], look: Look) -> None:
    # On each of these devices programs end in the order of their dispatch, over all threads.
    last = []
    for device in devices:
        program, operand = sentinel_program((device,))
        last.append(program(operand))
    _wait_all(last, look)


def _wait_all(arrays: Sequence[Any], look: Look) -> None:
    # Polls, because a blocking wait would ignore Ctrl-C and the deadline.
    for array in arrays:
        pause = PAUSE_SEC
        while not _is_ready(array):
            look()
            sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SEC)


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
    sentinel_program.cache_clear()
    _pending.clear()


processes.in_child(processes.Stage.PROGRAM, forget)
