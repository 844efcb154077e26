"""Host functions that may use JAX while programs wait for them, however many programs wait.

XLA:CPU has one pool of threads for the programs that it runs asynchronously, as many as there are cores or devices, and
takes 32 programs at a time for each device. A program holds a thread and a place until it ends, also while it waits for
an FFI future, and so may those that are queued behind it. A host function whose own programs were put into that pool
could wait for ever. But what a thread dispatches while it is inside a Python callback of JAX, XLA runs at once on that
thread (from 0.12 on also if the device has no place). So a host function is called from such a callback, unless it runs
on the thread that dispatched the program, which holds no thread of the pool and has queued nothing behind it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

from hostcallback import _jax_compat as compat
from hostcallback.receiver import fork
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages.message import Message, Sink
from hostcallback.receiver.native import bindings as native_library
from hostcallback.receiver.runtime.dispatch.calls import ThreadFor, this_thread

callback_scope_p = Primitive("inside_callback")
callback_scope_p.multiple_results = True


class _Inside(threading.local):
    function: Callable[[], None] | None = None  # what the program that the thread starts is to call


_inside = _Inside()
_lock = threading.Lock()  # protects everything below
_programs: dict[jax.Device, Callable[[], object]] = {}
_running = 0


class ReentrantSink:
    """The sink of a call on CPU, on the native transport."""

    __slots__ = ("_always", "_sink")

    def __init__(self, sink: Sink, *, several_devices: bool) -> None:
        """`sink` calls the host function; `several_devices`: the program alone may hold all threads of the pool."""
        self._sink = sink
        self._always = several_devices

    def __call__(self, message: Message) -> Any:
        """Returns what the sink returns, and raises what it raises."""
        global _running
        with _lock:
            _running += 1
            inside = self._always or not this_thread.dispatched or _running >= _pool_threads()
        try:
            if inside:
                return call_inside_callback(message.device, functools.partial(self._sink, message))
            return self._sink(message)
        finally:
            with _lock:
                _running -= 1


def call_inside_callback(device: jax.Device, function: Callable[[], Any]) -> Any:
    """Calls a function on the calling thread, inside a callback of a program on `device`, a CPU.

    Where XLA does not run that program at once, on another thread: XLA holds back what a thread dispatches until what
    it dispatched before is over, and until JAX 0.12 takes a thread for another one that has ended, whose number it was
    given. That one may have dispatched the very program that waits for the function.

    Returns:
        What the function returned; what it raises is raised.
    """
    outcome: list[Any] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # not through XLA, which would make a text of it
            raised.append(error)

    _inside.function = call
    try:
        _program(device)()
    except Exception:
        logger.exception("a host function on %s may wait for ever if it uses JAX", device)
        _call()  # unless it was called: better without the callback than not at all
    if _take() is not None:
        return _call_elsewhere(device, function)
    if raised:
        raise raised.pop()
    return outcome.pop()


def _call_elsewhere(device: jax.Device, function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            outcome.append(call_inside_callback(device, function))
        except BaseException as error:
            raised.append(error)

    thread = ThreadFor(call)
    try:
        thread.start()
    except (
        RuntimeError
    ):  # an interpreter that ends starts no thread: better without the callback than not at all
        return function()
    thread.join()
    if raised:
        raise raised.pop()
    return outcome.pop()


def forget() -> None:
    """Forgets everything: for a forked child, whose parent's XLA does not exist."""
    global _lock, _running
    _lock = threading.Lock()
    _programs.clear()
    _running = 0


fork.in_child(fork.Stage.PROGRAM, forget)


def _take() -> Callable[[], None] | None:
    function, _inside.function = _inside.function, None
    return function


def _call() -> None:
    function = _take()
    if function is not None:
        function()


def _call_in_default_float_mode() -> None:
    # XLA flushes denormals to zero in what its programs call.
    native_library.load().hcb_default_float_mode()
    _call()


def _program(device: jax.Device) -> Callable[[], object]:
    with _lock:
        program = _programs.get(device)
        if program is None:
            sharding = jax.sharding.SingleDeviceSharding(device)
            with jax.disable_jit(False):
                program = jax.jit(callback_scope_p.bind, out_shardings=sharding)
                # JAX lets no other thread into a program before its first call is over: this one calls nothing.
                function, _inside.function = _inside.function, None
                try:
                    program()
                finally:
                    _inside.function = function
            _programs[device] = program
        return program


@functools.cache
def _pool_threads() -> int:
    # As XLA counts them.
    cores = os.environ.get("NPROC", "")
    if not cores.isdecimal():
        cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max(int(cores), len(jax.local_devices(backend="cpu")))


compat.call_when_run(callback_scope_p, _call_in_default_float_mode)
