"""Lowers a tap to the transport of its platform."""

from __future__ import annotations

from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat, transport
from hostcallback.primitive import TAP_EFFECT, tap_p
from hostcallback.tap_spec import Absent, TapSpec
from receiver.runtime import runtime
from receiver.wire import ArraySpec, Flags, encode_prefix


def _lower_native(ctx: Any, *operands: Any, tap: TapSpec, transforms: Any, absent: Absent) -> Any:
    if not transport.use_native("cpu"):
        return _lower_callback(ctx, *operands, tap=tap, transforms=transforms, absent=absent)
    context = compat.LoweringContext(ctx)
    transport.start("cpu")
    prefix = _prefix(context, ctx.avals_in, tap, transforms, absent)
    token = context.token_in(TAP_EFFECT)
    token_out = context.custom_call(
        transport.FFI_TARGET, token, operands, {"prefix": compat.uint8_attribute(prefix)}
    )
    # An unordered tap hangs on the token that comes in, so it cannot start before its program point's
    # predecessors are known, but nothing waits for it.
    context.set_token_out(TAP_EFFECT, token_out if tap.ordered else token)
    return operands


def _lower_callback(ctx: Any, *operands: Any, tap: TapSpec, transforms: Any, absent: Absent) -> Any:
    context = compat.LoweringContext(ctx)
    platform = context.platform
    transport.start(platform)
    prefix = _prefix(context, ctx.avals_in, tap, transforms, absent)
    dtypes = [np.dtype(aval.dtype) for aval in ctx.avals_in]
    emit = transport.callback_emitter(platform, prefix, dtypes, context.devices())
    token = context.token_in(TAP_EFFECT)
    token_out = context.python_callback(emit, token, operands, ctx.avals_in)
    context.set_token_out(TAP_EFFECT, token_out if tap.ordered else token)
    return operands


def _refuse_automatic_sharding(context: compat.LoweringContext, tap: TapSpec) -> None:
    if context.partially_manual or (not context.manual and context.automatic_devices > 1):
        raise NotImplementedError(
            f"the tap {tap.name} at {tap.source_line} is in a program that the compiler partitions over "
            f"{context.automatic_devices} devices, where a tap cannot run yet: put the code around it into "
            "jax.shard_map over all axes of the mesh (each device then taps its shard), or tap jax.device_get(x) "
            "outside of jit"
        )


def _prefix(
    context: compat.LoweringContext, avals: Any, tap: TapSpec, transforms: Any, absent: Absent
) -> bytes:
    _refuse_automatic_sharding(context, tap)
    consumer = tap.consumer(transforms, absent)
    context.keep_alive(runtime.registry.lease(consumer))
    specs = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in avals]
    return encode_prefix(consumer.consumer_id, Flags.ORDERED if tap.ordered else Flags(0), specs)


compat.register_lowering(tap_p, _lower_callback)
compat.register_lowering(tap_p, _lower_native, platform="cpu")
