"""Lets host functions call JAX, however many programs wait for host functions at that time.

XLA:CPU has one pool of threads for asynchronous programs, as large as the number of cores or devices, and accepts 32
programs at a time per device. A program holds a thread and a slot until it ends, also while it waits for an FFI
future, and so may the programs that are queued behind it. If a host function's programs were put into that pool, the
host function could wait without end. But XLA runs a program that is dispatched inside a Python callback of JAX at once
on the dispatching thread (from JAX 0.12 on even if the device has no free slot). So a host function is called from
such a callback, unless it runs on the thread that dispatched the program, which holds no thread of the pool and has
queued no programs behind it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from hostcallback import _jax_compat as compat
from hostcallback.receiver import processes
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.dispatch.calls import ThreadFor, this_thread
from hostcallback.receiver.runtime.dispatch.gil_share import HeldInterrupts

callback_scope_p = compat.Primitive("inside_callback")
callback_scope_p.multiple_results = True


class _Inside(threading.local):
    function: Callable[[], None] | None = None  # the function that the program started by this thread calls


_inside = _Inside()
_lock = threading.Lock()  # protects everything below
_programs: dict[jax.Device, Callable[[], object]] = {}
_running = 0


class ReentrantSink:
    """The sink of a call on CPU, on the native transport."""

    __slots__ = ("_always", "_sink")

    def __init__(self, sink: Sink, *, several_devices: bool) -> None:
        """Wraps `sink`, which calls the host function.

        `several_devices`: whether the program runs on several devices, so that it alone may hold all threads of the
        pool.
        """
        self._sink = sink
        self._always = several_devices

    def __call__(self, message: Message) -> Any:
        """Returns the result of the sink, or raises its exception."""
        global _running
        counted = False
        try:
            with _lock:
                # Both or neither: Python looks for a signal at calls and jumps only.
                _running += 1
                counted = True
                # A call inside a callback costs a program, so it is made only where the function could wait for a
                # thread that waits for it: see the module's docstring.
                inside = self._always or not this_thread.dispatched or _running >= _pool_threads()
            if inside:
                return call_inside_callback(message.device, functools.partial(self._sink, message))
            return self._sink(message)
        finally:
            if counted:
                with _lock:
                    _running -= 1


def call_inside_callback(device: jax.Device, function: Callable[[], Any]) -> Any:
    """Calls a function inside a callback of a program on `device`, a CPU; on the calling thread if possible.

    If XLA does not run that program at once, another thread calls the function. XLA delays a program until the earlier
    programs of the same thread have ended. Before JAX 0.12 it confuses a thread with an ended one that had the same id,
    which may have dispatched the very program that waits for the function.

    Returns:
        The result of the function. Its exceptions are raised.

    Raises:
        KeyboardInterrupt: Ctrl-C came outside of the function, where JAX would have made a text of it.
    """
    outcome: Future[Any] = Future()
    interrupts = this_thread.interrupts
    _inside.function = functools.partial(_call_into, outcome, function, interrupts)
    try:
        if interrupts is not None:
            interrupts.hold()
        try:
            _program(device)()
        except Exception:
            logger.exception("a host function on %s may wait without end if it uses JAX", device)
            _call()  # if the program has not called it: without the callback is better than not at all
    finally:
        was_called = _take() is None
        if interrupts is not None:
            interrupts.end()
    # An interrupt that came is raised here, but after an exception of the function only when the program has left.
    if interrupts is not None and not (was_called and outcome.exception()):
        interrupts.allow()
    return outcome.result() if was_called else _call_elsewhere(device, function)


def _call_into(
    outcome: Future[Any], function: Callable[[], Any], interrupts: HeldInterrupts | None = None
) -> None:
    try:
        if interrupts is None:
            result = function()
        else:
            try:
                interrupts.allow()
                result = function()
            finally:
                interrupts.hold()
    except BaseException as error:  # kept here, because XLA would turn the exception into a text
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def _call_elsewhere(device: jax.Device, function: Callable[[], Any]) -> Any:
    outcome: Future[Any] = Future()
    thread = ThreadFor(lambda: _call_into(outcome, lambda: call_inside_callback(device, function)))
    try:
        thread.start()
    except (
        RuntimeError
    ):  # Python starts no threads during shutdown: without the callback is better than not at all
        return function()
    thread.join()
    return outcome.result()


def forget() -> None:
    """Drops all state, for a forked child, in which XLA of the parent does not run."""
    global _lock, _running
    _lock = threading.Lock()
    _programs.clear()
    _running = 0


processes.in_child(processes.Stage.PROGRAM, forget)


def _take() -> Callable[[], None] | None:
    function, _inside.function = _inside.function, None
    return function


def _call() -> None:
    function = _take()
    if function is not None:
        function()


def _call_in_default_float_mode() -> None:
    # XLA sets the float mode of its threads to flush denormals to zero, also for functions that its programs call.
    native_library.load_holding_lock().hcb_default_float_mode()
    _call()


def _program(device: jax.Device) -> Callable[[], object]:
    with _lock:
        program = _programs.get(device)
        if program is None:
            sharding = jax.sharding.SingleDeviceSharding(device)
            with jax.disable_jit(False):
                program = jax.jit(callback_scope_p.bind, out_shardings=sharding)
                # JAX lets no other thread call a program during its first call, so the first call runs no function.
                function, _inside.function = _inside.function, None
                try:
                    program()
                finally:
                    _inside.function = function
            _programs[device] = program
        return program


@functools.cache
def _pool_threads() -> int:
    # The number of threads in XLA's pool, computed as XLA does.
    cores = os.environ.get("NPROC", "")
    if not cores.isdecimal():
        cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max(int(cores), len(jax.local_devices(backend="cpu")))


compat.call_when_run(callback_scope_p, _call_in_default_float_mode)
