"""The verdict about a call of a tested program: whether it is the first failed call of a row, and its number.

On CPUs a native handler keeps what it takes, in programs of one device. Elsewhere each failed call counts as the first.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.receiver.native import bindings as native_library

FINE, FIRST, FURTHER = range(3)
NOT_COUNTED = np.uint32(0xFFFFFFFF)
"""The number of a call where nothing counts them."""

TARGET = "hostcallback_verdict"

verdict_p = Primitive("verdict")
_seen: Counter[int] = Counter()  # programs, by their checksum
_seen_lock = threading.Lock()


def verdict(failed: Any, program: str) -> Any:
    """Judges a call of a program, in the trace of a whole program.

    Args:
        failed: bool [n], the tests of the call.
        program: what the program is; programs that are alike are told apart by their order. It is in the compiled
            program, and so in the key of JAX's persistent cache.

    Returns:
        uint32 [2]: `FINE`, `FIRST` or `FURTHER`, and the number of the call, from 0. `FIRST` is a call in which a test
        failed that did not fail in the call before.
    """
    with _seen_lock:
        _seen[zlib.crc32(program.encode())] += 1
        count = _seen[zlib.crc32(program.encode())]
    number = zlib.crc32(f"{program} {count}".encode()) & 0x7FFFFFFF
    return verdict_p.bind(failed, program=number)


def forget() -> None:
    """Makes the next call of each program in which a test fails the first of a row. Any thread."""
    if transport.use_native("cpu"):
        native_library.load().hcb_verdict_forget()


def _reference(failed: Any) -> list[Any]:
    first = jnp.where(jnp.any(failed), jnp.uint32(FIRST), jnp.uint32(FINE))
    return [jnp.stack([first, jnp.uint32(NOT_COUNTED)])]


def _lower(ctx: Any, failed: Any, *, program: int) -> Any:
    context = compat.LoweringContext(ctx)
    is_native = tuple(context.platforms) == ("cpu",) and transport.use_native("cpu")
    if not is_native or context.for_export or context.manual or context.device_count > 1:
        return compat.lower_function(context, _reference, [failed])
    _register()
    attributes = {"program": np.asarray([program], np.int32)}
    return compat.pure_call(context, TARGET, [failed], ctx.avals_out, attributes)


@functools.cache
def _register() -> None:
    # Not called at import, because JAX reports a registration before the backend exists as a failure of the backend.
    handler = native_library.load().hcb_verdict
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")


verdict_p.def_abstract_eval(lambda failed, program: jax.core.ShapedArray((2,), np.dtype(np.uint32)))
compat.register_lowering(verdict_p, _lower)
