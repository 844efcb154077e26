"""Keeps the only result of a program with taps from XLA:CPU's fusion of reductions (jaxlib 0.10).

The fusion takes an array in with its readers, and removes the array, also if the program returns it: compiling fails
with "instruction is live and cannot be removed". A program reads its only result only for a side effect, such as a tap
of its norm. A call that has the result as operand is a reader that the fusion leaves. Each device reads its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.primitives import effects

KEPT_NAME = "hostcallback_kept_result"


def keep(context: compat.LoweringContext, token: Any, result: Any, aval: compat.Aval) -> None:
    """Emits a call behind all taps that reads a program's only result.

    Args:
        context: where the program is lowered.
        token: the last one.
        result: the lowered result, of a program for CPUs.
        aval: its type.
    """
    if tuple(context.platforms) != ("cpu",) or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return  # keys are not reduced
    # The clock's handler takes any operands, and has no results here.
    if not transport.use_native("cpu"):
        compat.python_callback_with_results(context, lambda partition, value: (), token, [result], [aval], [])
    elif context.automatic:
        context.partitioned_call(KEPT_NAME, token, [result], "")
    else:
        context.custom_call(transport.FFI_CLOCK_TARGET, token, [result], {})


def _partition_kept(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], _: Any, result_sharding: Any, config: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # XLA calls this on one of its threads while it compiles. Each device has its part.
    shardings = [compat.REPLICATED if s.is_maximal() else s for s in arg_shardings[1:]]
    operands = [
        (tuple(sharding.tile(shape).dimensions()), np.dtype(shape.numpy_dtype()))
        for sharding, shape in zip(shardings, arg_shapes[1:], strict=True)
    ]
    module = compat.call_of_a_partition(transport.FFI_CLOCK_TARGET, operands)
    return module, [arg_shardings[0], *shardings], result_sharding


compat.register_partitioner(KEPT_NAME, _partition_kept)


effects.keep_only_result = keep
