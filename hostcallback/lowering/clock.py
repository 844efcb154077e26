"""Lowers readings of the host's clock: to a native handler on CPUs, to a Python callback elsewhere."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.primitives.clock import clock_p
from hostcallback.primitives.effects import TAP_EFFECT

CALLBACK_INTERVAL_US = 20_000
"""Microseconds between two readings through Python, which take some 50 microseconds each."""


def _lower(ctx: Any, step: Any) -> Any:
    context = compat.LoweringContext(ctx)
    token = context.token_in(TAP_EFFECT)
    # If the compiler partitions the program, all devices must read the same time, or they would take different
    # branches: the callback runs on one device, and its result is sent to all.
    if context.platform == "cpu" and transport.use_native("cpu") and not context.automatic:
        transport.start("cpu")
        _, results = compat.custom_call_with_results(
            context, transport.FFI_CLOCK_TARGET, token, [step], ctx.avals_out, {}
        )
        return results
    if context.for_export:
        raise NotImplementedError(
            "a loop with a progress bar is exported, and its clock would be a Python callback, which JAX cannot "
            "export: programs with bars are exported for one CPU, or inside a shard_map, on the native transport"
        )
    _, results = compat.python_callback_with_results(
        context, _read, None, [step], ctx.avals_in, ctx.avals_out
    )
    return results


def _read(partition: Any, step: Any) -> tuple[np.ndarray[Any, Any]]:
    now_us = time.perf_counter_ns() // 1000 % (1 << 32)
    return (np.array([now_us, CALLBACK_INTERVAL_US], np.uint32),)


compat.register_lowering(clock_p, _lower)
