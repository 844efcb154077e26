"""FFI calls for comparison: one does nothing in place of a tap, and one keeps a device waiting."""

from __future__ import annotations

import ctypes
import functools
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from hostcallback import _jax_compat as compat
from hostcallback.primitives.effects import PASSED_TOKEN_EFFECT, TAP_EFFECT
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from tools.build_native import FLAGS, SOURCE_DIR, find_compiler

EMPTY_TARGET = "hostcallback_bench_empty"
PACE_TARGET = "hostcallback_bench_pace"
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
    for target, handler in ((EMPTY_TARGET, library.hcb_bench_empty), (PACE_TARGET, library.hcb_bench_pace)):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


# With the effects of a tap and a lowering like a tap's: the program around it, `jax.jit` included, is the same.
empty_p = Primitive("bench_empty")
empty_p.multiple_results = True
empty_p.def_effectful_abstract_eval(lambda *avals: (list(avals), {TAP_EFFECT, PASSED_TOKEN_EFFECT}))


def _lower(ctx: Any, *operands: Any) -> Any:
    _register()
    context = compat.LoweringContext(ctx)
    specs = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in ctx.avals_in]
    attributes = {"prefix": np.frombuffer(encode_prefix(1, Flags.ORDERED, specs), np.uint8)}
    token = context.custom_call(EMPTY_TARGET, context.token_in(TAP_EFFECT), operands, attributes)
    context.set_token_out(TAP_EFFECT, token)
    return operands


compat.register_lowering(empty_p, _lower)


def empty_call(x: Any) -> Any:
    """An empty FFI custom call with the operands, the token and the attribute of a tap of the array `x`; CPU only."""
    return empty_p.bind(x)[0]


def pace(x: Any, sleep_sec: float) -> Any:
    """Returns `x`, a float32 scalar, after a while in which the device uses no processor; CPU only."""
    _register()
    call = jax.ffi.ffi_call(PACE_TARGET, jax.ShapeDtypeStruct((), np.float32), has_side_effect=True)
    return call(x, sleep_ns=np.int64(round(sleep_sec * 1e9)))
