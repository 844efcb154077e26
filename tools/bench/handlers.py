"""FFI calls for comparison: in place of a tap one does nothing, one copies; one keeps a device waiting, one calls."""

from __future__ import annotations

import ctypes
import functools
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive

from hostcallback import _jax_compat as compat
from hostcallback.primitives.effects import PASSED_TOKEN_EFFECT, TAP_EFFECT
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from tools.build_native import FLAGS, SOURCE_DIR, find_compiler

EMPTY_TARGET = "hostcallback_bench_empty"
COPY_TARGET = "hostcallback_bench_copy"
PACE_TARGET = "hostcallback_bench_pace"
CALL_TARGET = "hostcallback_bench_call"
SOURCE = Path(__file__).with_suffix(".cc")


@functools.cache
def _register() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "handlers.so"
        line = [*find_compiler(), *FLAGS, f"-I{SOURCE_DIR}", str(SOURCE), "-o", str(path)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"compiling the benchmarks' handlers failed:\n{shlex.join(line)}\n{done.stderr}"
            )
        library = ctypes.CDLL(str(path))
    for target in (EMPTY_TARGET, COPY_TARGET, PACE_TARGET, CALL_TARGET):
        handler = getattr(library, target.replace("hostcallback", "hcb"))
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


# With the effects of a tap and a lowering like a tap's: the program around it, `jax.jit` included, is the same.
in_place_p = Primitive("bench_in_place")
in_place_p.multiple_results = True
in_place_p.def_effectful_abstract_eval(lambda *avals, **_: (list(avals), {TAP_EFFECT, PASSED_TOKEN_EFFECT}))


def _lower(ctx: Any, *operands: Any, address: int | None) -> Any:
    _register()
    context = compat.LoweringContext(ctx)
    if address is None:
        specs = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in ctx.avals_in]
        attributes = {"prefix": np.frombuffer(encode_prefix(1, Flags.ORDERED, specs), np.uint8)}
    else:
        attributes = {"address": np.int64(address)}
    target = EMPTY_TARGET if address is None else COPY_TARGET
    token = context.custom_call(target, context.token_in(TAP_EFFECT), operands, attributes)
    context.set_token_out(TAP_EFFECT, token)
    return operands


compat.register_lowering(in_place_p, _lower)


def empty_call(x: Any) -> Any:
    """An empty FFI custom call with the operands, the token and the attribute of a tap of the array `x`; CPU only."""
    return in_place_p.bind(x, address=None)[0]


class Copies:
    """The least that delivers arrays: a call copies each to memory, and a thread makes an array of it for a function.

    CPU only, arrays of one type and shape. There is one counter, and no order, names or bounds: a slow thread finds
    later arrays in place of earlier ones. The counter is written with release order, which this thread reads as it is:
    enough on x86.
    """

    def __init__(self, like: Any, function: Callable[[Any], None], slots: int) -> None:
        """`like` has the type and the shape. The thread and the memory of the slots stay until the process ends."""
        line = 64
        slot_bytes = -(-like.nbytes // line) * line
        memory = np.zeros(3 * line + slots * slot_bytes, np.uint8)
        self._memory = memory[-memory.ctypes.data % line :]
        self._copied, sizes = self._memory[:8].view(np.int64), self._memory[line : line + 24].view(np.int64)
        sizes[:] = slots, slot_bytes, like.nbytes
        self._slots = [
            self._memory[begin : begin + like.nbytes].view(like.dtype).reshape(like.shape)
            for begin in range(2 * line, 2 * line + slots * slot_bytes, slot_bytes)
        ]
        self._function = function
        self._delivered = 0
        self._wanted, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0
        threading.Thread(target=self._deliver, daemon=True).start()

    def __call__(self, x: Any) -> Any:
        """Emits the array `x` in a program, in place of a tap."""
        return in_place_p.bind(x, address=self._memory.ctypes.data)[0]

    def begin(self, count: int) -> None:
        """Has the thread deliver the next `count` arrays."""
        self._until += count
        self._wanted.release()

    def wait(self) -> None:
        """Returns once they are delivered."""
        self._done.acquire()

    def _deliver(self) -> None:
        _sleep_precisely()
        while self._wanted.acquire():
            while self._delivered < self._until:
                for number in range(self._delivered, min(int(self._copied[0]), self._until)):
                    self._function(self._slots[number % len(self._slots)][...])
                    self._delivered += 1
                if self._delivered < self._until:
                    time.sleep(LOOK_SEC)
            self._done.release()


LOOK_SEC = 50e-6
"""Seconds between two looks of a thread for what was copied."""


def _sleep_precisely() -> None:
    # As a receiver's thread does: the kernel adds 50 us to sleeps by default.
    set_timer_slack = 29
    ctypes.CDLL(None).prctl(set_timer_slack, 5000, 0, 0, 0)


def pace(x: Any, sleep_sec: float) -> Any:
    """Returns `x`, a float32 scalar, after a while in which the device uses no processor; CPU only."""
    _register()
    call = jax.ffi.ffi_call(PACE_TARGET, jax.ShapeDtypeStruct((), np.float32), has_side_effect=True)
    return call(x, sleep_ns=np.int64(round(sleep_sec * 1e9)))


_Called = ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_int32)] * 3)
_called: list[Any] = []  # programs hold addresses of these


def bare_callback(function: Callable[[int, int], int | None], result: Any, first: Any, second: Any) -> Any:
    """`io_callback` of two int32 scalars by the least C: XLA's thread takes the interpreter lock and calls; CPU only.

    The result is an int32; a function without one leaves it as it is, and so must `result` be None. The function must
    not use JAX, whose threads may all wait for it.
    """

    def call(first: Any, second: Any, out: Any) -> None:
        found = function(first[0], second[0])
        if found is not None:
            out[0] = found

    _register()
    _called.append(_Called(call))
    address = ctypes.cast(_called[-1], ctypes.c_void_p).value
    ffi_call = jax.ffi.ffi_call(CALL_TARGET, jax.ShapeDtypeStruct((), np.int32), has_side_effect=True)
    found = ffi_call(np.int32(first), jax.numpy.int32(second), address=np.int64(address))
    return None if result is None else found


class _Caller:
    """A Python thread that calls functions for one thread of XLA, each from a program, so that it may use JAX."""

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], int | None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._function: Callable[[], int | None] = lambda: None
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, function: Callable[[], int | None]) -> int | None:
        """Returns the function's result, or raises its exception."""
        self._functions.put(function)
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self) -> None:
        program = jax.jit(lambda: io_callback(self._call, jax.ShapeDtypeStruct((), np.int32)))
        while True:
            self._function = self._functions.get()
            program()

    def _call(self) -> Any:
        try:
            self._results.put(self._function())
        except Exception as error:
            self._results.put(error)
        return np.int32(0)


_callers: dict[int, _Caller] = {}  # by the identity of XLA's thread


def handed_callback(function: Callable[[int, int], int | None], result: Any, first: Any, second: Any) -> Any:
    """`bare_callback` whose function may use JAX: another thread calls it from a program, while XLA's thread waits."""

    def hand(first: int, second: int) -> int | None:
        thread = threading.get_ident()
        caller = _callers.get(thread) or _callers.setdefault(thread, _Caller())
        return caller.call(functools.partial(function, first, second))

    return bare_callback(hand, result, first, second)
