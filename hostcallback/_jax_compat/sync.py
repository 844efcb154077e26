"""Waits for dispatched programs: JAX's waits, which we extend, XLA:CPU's execution streams, and runtime tokens."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import jax
from jax._src import (
    dispatch as _dispatch,  # runtime_tokens: what a thread dispatched; ends `jax.effects_barrier`
)
from jax._src.interpreters import mlir as _mlir  # global_thread_pool
from jax._src.lib import xla_client as _xla_client  # execution_stream_id, batched_block_until_ready

from hostcallback._jax_compat.tracing import ArrayImpl
from hostcallback._jax_compat.types import Effect


def extend_effects_barrier(function: Callable[[], None]) -> None:
    """Has `jax.effects_barrier`, and JAX's exit, call `function` when they have waited for JAX's own effects.

    Both end in `RuntimeTokenSet.block_until_ready` (0.8 to 0.12), which programs reach by several names. Without it,
    `jax.effects_barrier` returns before the messages of taps are delivered.
    """
    # On the class, since each thread has its own instance.
    tokens = type(_dispatch.runtime_tokens)
    wait: Any = tokens.block_until_ready

    @functools.wraps(wait)
    def wait_for_both(self: Any) -> None:
        wait(self)
        function()

    tokens.block_until_ready = wait_for_both  # type: ignore[method-assign]


def extend_waits(function: Callable[[], None], unless: Callable[[], Any]) -> Callable[[], None]:
    """Makes every wait for results in Python call `function` once the results are ready, unless `unless()` is true.

    `jax.block_until_ready` takes several arrays to `xla_client.batched_block_until_ready`, and one to its method.
    Numbers, texts, `numpy` by `__array__` and `jax.device_get` take the value from `ArrayImpl._value`, other libraries
    from `__dlpack__` (0.8 to 0.12). Without it, results are ready before the output of their program is. For
    `numpy.asarray` and `memoryview` see `get_buffer_slot`.

    Returns:
        A function that undoes it. It leaves a function alone that other code has replaced since: the replacement calls
        ours, which goes on.

    Raises:
        LookupError: this JAX lacks one of these; nothing has changed then.
    """
    waits = [
        (ArrayImpl, "block_until_ready"),
        (_xla_client, "batched_block_until_ready"),
        (ArrayImpl, "_value"),
        (ArrayImpl, "__dlpack__"),
    ]
    replaced = [(owner, name, vars(owner).get(name)) for owner, name in waits]
    for owner, name, found in replaced:
        if not (isinstance(found, property) if name == "_value" else callable(found)):
            raise LookupError(
                f"{owner.__name__} has no {'property' if name == '_value' else 'function'} {name}"
            )

    def extended(wait: Any) -> Any:
        if isinstance(wait, property):
            return property(extended(wait.fget))

        @functools.wraps(wait, assigned=("__name__", "__doc__"))  # nanobind has no name for the rest
        def wait_for_both(arrays: Any, **kwargs: Any) -> Any:
            result = wait(arrays, **kwargs) if kwargs else wait(arrays)
            if not unless():
                function()
            return result

        return wait_for_both

    ours = [extended(wait) for _, _, wait in replaced]
    for (owner, name, _), wait_for_both in zip(replaced, ours, strict=True):
        setattr(owner, name, wait_for_both)

    def undo() -> None:
        for (owner, name, wait), wait_for_both in zip(replaced, ours, strict=True):
            if vars(owner).get(name) is wait_for_both:
                setattr(owner, name, wait)

    return undo


_TP_AS_BUFFER = 160
"""Offset of `tp_as_buffer` in CPython's `PyTypeObject` on 64 bits, 3.11 to 3.14 with the interpreter lock."""
_PY_BF_GETBUFFER = 1
"""The slot's number for `PyType_GetSlot`, of the stable interface."""


def get_buffer_slot() -> ctypes.c_void_p:
    """The cell with the address of the function that gives out an array's memory (`bf_getbuffer`).

    `numpy.asarray(x)` and `memoryview(x)` go through it (0.8 to 0.12) and run no Python, so that no function of
    Python can be put there: what replaces it must be native, and end in the function that was there.

    Raises:
        LookupError: the slot is not where CPython 3.11 to 3.14 has it.
    """
    known = sys.implementation.name == "cpython" and sys.version_info < (3, 15) and sys.maxsize > 2**32
    if not known or sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise LookupError(f"the layout of types of {sys.version} is not known")
    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    functions = ctypes.c_void_p.from_address(id(ArrayImpl) + _TP_AS_BUFFER).value
    expected = slot_of(ArrayImpl, _PY_BF_GETBUFFER)
    if not functions or not expected:
        raise LookupError("JAX's arrays give out no buffers")
    slot = ctypes.c_void_p.from_address(functions)
    if slot.value != expected:
        raise LookupError("the buffer slot of JAX's arrays is not where it was looked for")
    return slot


PROGRAMS_IN_FLIGHT = 32
"""Programs that XLA:CPU lets a device have in flight (its `max_inflight_computations`); counted on 0.8 to 0.12.

A fence that takes fewer does not keep other threads from dispatching.
"""


def dispatches_asynchronously() -> bool:
    """Whether XLA:CPU returns from a dispatch before the program is over."""
    config: Any = jax.config  # whose flags are no attributes
    return bool(config.read("jax_cpu_enable_async_dispatch"))


def execution_stream(ident: int) -> contextlib.AbstractContextManager[None]:
    """Programs dispatched inside go to the execution stream of the thread with this `threading.get_ident` (Linux).

    jaxlib's CPU client gives a thread the stream `std::hash<std::thread::id>` (`PosixEnv::GetCurrentThreadId` of tsl,
    0.8 to 0.12), which in libstdc++ is `_Hash_bytes` of the pthread's number. Elsewhere the number is wrong:
    `hostcallback.sync.inflight` tries it before it relies on it.
    """
    stream = _xla_client.execution_stream_id(_hash_of_thread(ident))
    return cast("contextlib.AbstractContextManager[None]", stream)


@functools.lru_cache(maxsize=4096)
def _hash_of_thread(ident: int) -> int:
    # MurmurHash64A of eight bytes, as in libstdc++'s hash_bytes.cc.
    factor, mask = 0xC6A4A7935BD1E995, 2**64 - 1

    def mixed(value: int) -> int:
        return value ^ value >> 47

    value = (0xC70F6907 ^ (8 * factor & mask)) ^ (mixed(ident * factor & mask) * factor & mask)
    value = mixed(mixed(value * factor & mask) * factor & mask)
    return value - 2**64 if value >= 2**63 else value


def in_callback_of_jax() -> bool:
    """Whether the calling thread is inside a host function that JAX calls for a program.

    JAX sets no mark for it, so this looks for the module `jax._src.callback` among the frames (0.8 to 0.12). Without
    this test, a host function that calls `jax.effects_barrier` would wait for the program that waits for it.
    """
    frames = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_globals.get("__name__") == "jax._src.callback" for frame, _ in frames)


def keep_compiler_threads() -> None:
    """Keeps JAX's pool of compiler threads from being deleted in a forked child, which has none of these threads.

    At its end, the child would wait for them (seen on 0.8 to 0.12: it hangs or crashes, also without this package).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(_mlir, "global_thread_pool", None)))


# ---- The tokens of what threads dispatched ---------------------------------------------------------------------------


def thread_tokens() -> dict[str, Any]:
    """The calling thread's runtime tokens: a dict that lives as long as the thread and stays current.

    `RuntimeTokenSet` is a `threading.local` (0.4 to 0.12); its `current_tokens` maps each ordered effect to
    the token of the last computation that the thread dispatched with it.
    """
    return _dispatch.runtime_tokens.__dict__


def asks_for_token(frame: FrameType) -> bool:
    """Whether a frame belongs to JAX's search for a token at the start of a dispatch.

    `RuntimeTokenSet.get_token_input` (0.8 to 0.12) calls the effect's hash. Other places do, too: without this test,
    an error for the next call could be raised while a program is traced or lowered.
    """
    nearest = itertools.islice(traceback.walk_stack(frame), 4)
    return any(caller.f_code.co_name == "get_token_input" for caller, _ in nearest)


def has_ordered_tokens(tokens: dict[str, Any]) -> bool:
    """Whether a thread has the token of an ordered effect."""
    return bool(tokens.get("current_tokens"))


def ordered_tokens(tokens: dict[str, Any], effect: Effect) -> list[jax.Array]:
    """The array to wait on for what a thread dispatched with the ordered `effect`: one or none."""
    buffer = getattr(dict(tokens.get("current_tokens", {})).get(effect), "_buf", None)
    return [] if buffer is None else [buffer]


def drop_token(tokens: dict[str, Any], effect: Effect) -> None:
    """Makes a thread's next computation with `effect` begin with a new token.

    Without it, the token of a program that failed goes into the next program with the effect (0.8 to 0.12), which then
    fails with the same error.
    """
    tokens.get("current_tokens", {}).pop(effect, None)


def wait_for_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the last program with any effect that a thread dispatched to each device; whether it failed or not."""
    for token in list(tokens.get("output_runtime_tokens", {}).values()):
        # The token of a failed program raises the program's error, which the user of its results gets.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def drop_failed_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the thread's programs, and forgets those that failed.

    Without it, `jax.effects_barrier` and the exit of the process raise what they failed with once more (0.8 to 0.12).
    """
    runtime_tokens = tokens.get("output_runtime_tokens", {})
    for device, token in list(runtime_tokens.items()):
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError:
            del runtime_tokens[device]
