"""Lowers calls of host functions to the transport of their platform."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport, reentrant_calls as reentrant
from hostcallback.primitives.call import call_p, call_where, masked_call_p
from hostcallback.primitives.effects import TAP_EFFECT
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.wire import ArraySpec, Flags, encode_prefix
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostcallback.sync import inflight
from hostcallback.tracing.tap_spec import ON_ONE_DEVICE, TapSpec


def _describe(call: TapSpec, transforms: Any, consumer_id: int) -> TapDescriptor:
    return dataclasses.replace(call.describe(transforms, ()), consumer_id=consumer_id)


def _lower(
    ctx: Any, *operands: Any, call: TapSpec, transforms: Any, result_avals: Any, vmap_method: str | None
) -> Any:
    context = compat.LoweringContext(ctx)
    _check_program(context, call)
    # Before the program can run, since its first message needs a reader.
    transport.start(context.platform)
    inflight.expect(context.local_devices())
    consumer = call.consumer(transforms, ())
    # If the compiler partitions, JAX's callback gathers the operands on the calling device and distributes the results.
    native = transport.calls_natively(context.platform) and not context.automatic
    if native:
        several = context.device_count > 1
        sink = reentrant.ReentrantSink(consumer.sink, several_devices=several)
        # The two cases need different ids, because equal ids mean equal consumers.
        consumer_id = call.consumer_id((*transforms, ("several devices", several)), ())
        described = functools.partial(_describe, call, transforms, consumer_id)
        consumer = dataclasses.replace(consumer, consumer_id=consumer_id, sink=sink, describe=described)
    context.keep_alive(runtime.registry.lease(consumer))
    compat.dispatch_synchronously(context)
    flags = Flags.CALL | (Flags.ORDERED if call.options.ordered else Flags(0))
    dtypes = [np.dtype(aval.dtype) for aval in ctx.avals_in]
    specs = [ArraySpec.of(dtype, aval.shape) for dtype, aval in zip(dtypes, ctx.avals_in, strict=True)]
    prefix = encode_prefix(consumer.consumer_id, flags, specs)
    token = context.token_in(TAP_EFFECT)
    if native:
        attributes = {"prefix": compat.uint8_attribute(prefix)}
        token_out, results = compat.custom_call_with_results(
            context, transport.FFI_CALL_TARGET, token, operands, ctx.avals_out, attributes
        )
    else:
        results = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in ctx.avals_out]
        ask = transport.callback_caller(context.platform, prefix, dtypes, results, context.devices())
        # Before JAX 0.10, XLA refuses callbacks with results on one device that take a token.
        ask_token = None if context.automatic and not call.options.ordered else token
        token_out, results = compat.python_callback_with_results(
            context, ask, ask_token, operands, ctx.avals_in, ctx.avals_out
        )
    context.set_token_out(TAP_EFFECT, token_out if call.options.ordered else token)
    return results


def _check_program(context: compat.LoweringContext, call: TapSpec) -> None:
    where = f"the call of {call.name} at {call.source_line} is in a program that"
    if len(context.platforms) > 1:
        raise NotImplementedError(
            f"{where} is lowered for several platforms at once, {', '.join(context.platforms)}: lower "
            "it for one at a time"
        )
    if context.for_export:
        raise NotImplementedError(
            f"{where} is exported, and no other process has its host function: export the code before "
            "it and behind it, "
            "or compute what it returns with JAX"
        )
    if context.automatic and (context.partially_manual or ON_ONE_DEVICE not in call.options.params):
        raise NotImplementedError(
            f"{where} the compiler partitions over {context.device_count} devices, where a call "
            "cannot run yet: put the code "
            "around it into jax.shard_map over all axes of the mesh, where each device calls with its shard"
        )


def _lower_where(ctx: Any, *operands: Any, **params: Any) -> Any:
    return compat.lower_function(
        compat.LoweringContext(ctx), functools.partial(call_where, **params), operands
    )


for primitive in (call_p, masked_call_p):
    compat.lower_with_devices(primitive)
compat.register_lowering(masked_call_p, _lower_where)
compat.register_lowering(call_p, _lower)
