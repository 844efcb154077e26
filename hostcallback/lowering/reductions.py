"""Lowers the tests of finite values and the statistics: to native handlers on CPUs, to reductions of XLA elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.primitives import reductions
from hostcallback.receiver.native import bindings as native_library

NOT_FINITE_TARGET = "hostcallback_not_finite"
STATISTICS_TARGET = "hostcallback_statistics"

NATIVE_DTYPES = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")


def _lower_not_finite(ctx: Any, *operands: Any, groups: tuple[int, ...]) -> Any:
    attributes = {"groups": np.asarray(groups, np.int32)}
    reference = functools.partial(reductions.reduce_not_finite, groups=groups)
    return _lower(ctx, operands, NOT_FINITE_TARGET, attributes, reference)


def _lower_statistics(ctx: Any, operand: Any) -> Any:
    return _lower(ctx, [operand], STATISTICS_TARGET, {}, reductions.reduce_statistics)


def _lower(
    ctx: Any, operands: Any, target: str, attributes: dict[str, Any], reference: Callable[..., Any]
) -> Any:
    context = compat.LoweringContext(ctx)
    if not _is_native(context, ctx.avals_in):
        return compat.lower_function(context, reference, operands)
    _register()
    return compat.pure_call(context, target, operands, ctx.avals_out, attributes)


def _is_native(context: Any, avals: Any) -> bool:
    # XLA would gather on one device what it divides among several. Another process may lack the handlers.
    if context.automatic or context.for_export or tuple(context.platforms) != ("cpu",):
        return False
    return all(aval.dtype.name in NATIVE_DTYPES for aval in avals) and transport.use_native("cpu")


@functools.cache
def _register() -> None:
    # Not called at import, because JAX reports a registration before the backend exists as a failure of the backend.
    library = native_library.load()
    handlers = {NOT_FINITE_TARGET: library.hcb_not_finite, STATISTICS_TARGET: library.hcb_statistics}
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


compat.register_lowering(reductions.not_finite_p, _lower_not_finite)
compat.register_lowering(reductions.statistics_p, _lower_statistics)
