"""Lowers taps, and calls of host functions, to the transport of their platform."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport, reentrant_calls as reentrant
from hostcallback.lowering import partition
from hostcallback.primitives import effect_dispatch, effects
from hostcallback.primitives.call import call_p, call_where, masked_call_p
from hostcallback.primitives.effects import TAP_EFFECT
from hostcallback.primitives.tap import mask_levels, tap_p
from hostcallback.receiver.messages import Consumer, Lease, Message, Sink
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks import batches, call
from hostcallback.receiver.wire.array_types import ArraySpec
from hostcallback.receiver.wire.frame import Flags, encode_prefix
from hostcallback.receiver.wire.tap_descriptor import FIRST_PROCESS, TapDescriptor
from hostcallback.sync import inflight
from hostcallback.tracing.leaves import Float0Leaves
from hostcallback.tracing.tap_spec import LAST, ON_ONE_DEVICE, Shards, TapSpec, Transform, public_transforms

MAX_BRANCHES = 32
"""Number of taps of one program from which on checks have no branch around them: a check costs 0.1 us, not 0.05."""


def _lower(
    ctx: compat.LoweringRuleContext,
    *results: compat.IrValue,
    tap: TapSpec,
    transforms: tuple[Transform, ...],
    float0_leaves: Float0Leaves,
) -> Sequence[compat.IrValue]:
    context = compat.LoweringContext(ctx)
    emit, mask = prepare(context, results, ctx.avals_in, tap, transforms, float0_leaves)
    token = context.token_in(TAP_EFFECT)
    emission = functools.partial(emit, token)
    if mask is not None and _may_branch(context):
        token_out = context.unless(context.negated(mask), token, emission)
    elif _has_branch(context, tap):
        token_out = context.unless(results[0], token, emission)
    else:
        token_out = emission()
    is_awaited = _is_awaited(context, tap) and context.at_end(TAP_EFFECT, _wait_for_output)
    # An unordered tap takes the incoming token, so it cannot start before its predecessors, but no operation waits for
    # it. Shards are numbered in the order of their emission, which is equal on all devices only in program order.
    # The wait at the end of a program is behind all taps.
    threads = tap.options.ordered or context.automatic or is_awaited
    context.set_token_out(TAP_EFFECT, token_out if threads else token)
    return results


def prepare(
    context: compat.LoweringContext,
    operands: Sequence[compat.IrValue],
    avals: Sequence[compat.Aval],
    tap: TapSpec,
    transforms: tuple[Transform, ...],
    float0_leaves: Float0Leaves,
) -> tuple[Callable[[compat.IrValue], compat.IrValue], compat.IrValue | None]:
    """Prepares the emission of a tap: starts its transport, and registers its consumer for as long as the program is.

    Returns:
        A function that emits the tap behind a token and returns the next token, and the tap's mask, if it has one.
    """
    _check_supported(context, tap, avals)
    levels = mask_levels(transforms)
    operands, avals = list(operands), list[compat.Aval](avals)
    if levels is not None and all(dims[-1] is None for dims in levels):
        # No vmap batched the condition: what runs takes part.
        transforms, operands, avals, levels = transforms[:-1], operands[:-1], avals[:-1], None
    mask = None if levels is None else operands[-1]
    transport.start(context.platform)
    devices = context.local_devices()
    inflight.expect(devices)
    native = transport.use_native(context.platform)
    emit = _emit_natively if native else _emit_through_python
    shards = _shards(context)
    consumer = tap.consumer(transforms, float0_leaves, shards, switchable=True)
    if _on_one_device(context, tap):
        emit, shards = _emit_on_one_device, None
        consumer = _called(tap, transforms, float0_leaves)
    lease = runtime.registry.lease(consumer)
    consumer = lease.consumer
    if shards is None:
        consumer.devices = max(consumer.devices, len(devices))
    runtime.rule_table.register(
        consumer, tap.options.without_devices, is_silent=_is_silent(context, tap, shards)
    )
    arrays, consumer_id = operands, consumer.consumer_id
    if context.for_export:
        # JAX does not export a program that keeps objects alive, so the process keeps the lease.
        _leases_of_exported_taps[consumer.consumer_id] = lease
        description = tap.describe(transforms, float0_leaves, shards).pack()
        consumer_id = call.WHOLE_ID if shards is None else call.SHARDS_ID
        arrays.insert(0, context.constant(description))
        avals.insert(0, jax.ShapeDtypeStruct(description.shape, description.dtype))
    else:
        context.keep_alive(lease)
        context.avoid_persistent_cache()
    whole_axes = _whole_axes(context, tap, transforms, avals)

    def emission(token: compat.IrValue) -> compat.IrValue:
        return emit(
            _Emission(context, token, arrays, avals, tap, consumer, consumer_id, whole_axes, mask is not None)
        )

    return emission, mask


def _is_awaited(context: compat.LoweringContext, tap: TapSpec) -> bool:
    # A program over several devices never runs on the thread that dispatches it.
    here = context.platform == "cpu" and transport.use_native("cpu") and context.device_count == 1
    return tap.options.awaited and here and not context.for_export


def _wait_for_output(context: compat.LoweringContext, token: compat.IrValue) -> Any:
    # JAX runs programs with callbacks on the thread that dispatches them, and so their output is there when it is back.
    compat.dispatch_synchronously(context)
    return context.custom_call(transport.FFI_OUTPUT_TARGET, token, [], {})


def _check_supported(context: compat.LoweringContext, tap: TapSpec, avals: Sequence[compat.Aval]) -> None:
    if len(context.platforms) > 1:
        raise NotImplementedError(
            f"the tap {tap.name} at {tap.source_line} is in a program that is lowered for several platforms at once, "
            f"{', '.join(context.platforms)}: lower it for one at a time, since each takes its taps another way"
        )
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        shapes = ", ".join(str(aval.shape) for aval in avals)
        raise NotImplementedError(
            f"the tap {tap.name} at {tap.source_line} is exported with symbolic shapes, {shapes}, and messages "
            "say their shapes beforehand: export the program for each shape that it is called with"
        )
    if context.for_export and not transport.use_native(context.platform):
        raise NotImplementedError(
            f"the tap {tap.name} at {tap.source_line} would be a Python callback, which JAX cannot export: programs "
            "with taps are exported for CPU and GPUs, on the native transport"
        )


def _has_branch(context: compat.LoweringContext, tap: TapSpec) -> bool:
    # The handler reads a check's predicate in any case. A branch around the check is faster to run, but the compile
    # time grows with the number of branches. If the compiler partitions the program, the condition would have to be
    # gathered from all devices. On a GPU the host would have to wait for the condition, so the receiver reads it.
    return tap.options.kind.is_check and _may_branch(context)


def _may_branch(context: compat.LoweringContext) -> bool:
    if context.automatic:
        return False
    if not transport.use_native(context.platform):
        return True
    return context.platform == "cpu" and context.kept_alive < MAX_BRANCHES


_leases_of_exported_taps: dict[int, Lease] = {}


class _Emission(NamedTuple):
    """One tap equation that is being lowered.

    Attributes:
        context: its lowering.
        token: orders the emission after earlier ones.
        operands: the arrays to send; of an exported tap the description is the first one.
        avals: their shapes and dtypes.
        tap: the equation's tap.
        consumer: takes the messages in this process.
        consumer_id: the id in the messages; of an exported tap that of all exported taps.
        whole_axes: by operand, the axes along which a device must have the whole array.
        is_masked: whether the last operand is a mask.
    """

    context: compat.LoweringContext
    token: compat.IrValue
    operands: Sequence[compat.IrValue]
    avals: Sequence[compat.Aval]
    tap: TapSpec
    consumer: Consumer
    consumer_id: int
    whole_axes: Sequence[Sequence[int]]
    is_masked: bool

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        return [np.dtype(aval.dtype) for aval in self.avals]

    def partitioned_call(
        self, target: str, operands: Sequence[compat.IrValue], **config: Any
    ) -> compat.IrValue:
        """Emits a custom call that the compiler partitions, so that each device sends its shard."""
        context = self.context
        text = partition.call_config(
            target, context.device_count, context.partly_manual_mesh, whole_axes=self.whole_axes,
            processes=_processes(context), **config,
        )  # fmt: skip
        return context.partitioned_call(partition.CALL_NAME, self.token, operands, text)


def _emit_natively(emission: _Emission) -> compat.IrValue:
    context, tap = emission.context, emission.tap
    if context.automatic:
        prefix = (emission.consumer_id, _flags(tap) | _when(tap))
        return emission.partitioned_call(
            transport.FFI_SHARD_TARGET, emission.operands, prefix=prefix, predicate=_predicate(context)
        )
    attributes = {"prefix": np.frombuffer(_prefix(emission, _when(tap)), np.uint8)}
    return context.custom_call(transport.FFI_TARGET, emission.token, emission.operands, attributes)


def _emit_through_python(emission: _Emission) -> compat.IrValue:
    context, tap, avals = emission.context, emission.tap, emission.avals
    platform, devices = context.platform, context.devices()
    if not context.automatic:
        prefix = _prefix(emission)
        function = transport.callback_emitter(platform, emission.consumer, prefix, emission.dtypes, devices)
        return compat.python_callback(context, function, emission.token, emission.operands, avals, [])[0]
    if platform == "tpu":
        raise NotImplementedError(
            f"the tap {tap.name} at {tap.source_line} is in a program that the compiler partitions over "
            f"{context.device_count} devices, which taps on TPU do not support yet: put the code around it into "
            "jax.shard_map over all axes of the mesh, where each device taps its shard"
        )
    target, index = context.add_python_callback(
        transport.callback_shard_emitter(platform, emission.consumer, _flags(tap), emission.dtypes, devices)
    )
    return emission.partitioned_call(target, context.widen(emission.operands, avals), index=index)


_ORDERED, _CHECK, _FOLDS, _BATCHED = map(int, (Flags.ORDERED, Flags.CHECK, Flags.FOLDS, Flags.BATCHED))
"""As numbers, since each operation of the enumeration makes an object."""


def _flags(tap: TapSpec) -> int:
    options, kind = tap.options, tap.options.kind
    ordered, check = _ORDERED if options.ordered else 0, _CHECK if kind.is_check else 0
    return ordered | check | (_FOLDS if kind.folds else 0)


def _whole_flags(context: compat.LoweringContext, tap: TapSpec, is_masked: bool) -> int:
    # Consumers of exported taps and of shards take their messages one by one.
    batched = tap.options.params.get("batched", False) and tap.structure.has_arrays and not context.for_export
    batched = batched and not is_masked  # its messages differ in shape
    return _flags(tap) | (_BATCHED if batched else 0)


def _when(tap: TapSpec) -> int:
    # The inputs of a failed call are sent at its end: until then a failed check does not end a program that sends them.
    if LAST in tap.options.params:
        return int(Flags.LAST)
    return 0 if tap.origin is None else int(Flags.LATE)


def _prefix(emission: _Emission, when: int = 0) -> bytes:
    context, tap, avals = emission.context, emission.tap, emission.avals
    specs = [_spec(aval.dtype, aval.shape) for aval in avals]
    predicate = _predicate(context) if tap.options.kind.is_check else 0
    flags = _whole_flags(context, tap, emission.is_masked) | when
    return encode_prefix(emission.consumer_id, flags, specs, predicate)


@functools.lru_cache(maxsize=1024)
def _spec(dtype: Any, shape: tuple[int, ...]) -> ArraySpec:
    return ArraySpec.of(np.dtype(dtype), shape)


def _predicate(context: compat.LoweringContext) -> int:
    # The predicate of a check is the first array, after the description if the tap is exported.
    return int(context.for_export)


def _whole_axes(
    context: compat.LoweringContext,
    tap: TapSpec,
    transforms: tuple[Transform, ...],
    avals: Sequence[compat.Aval],
) -> Sequence[Sequence[int]]:
    # To get a device's shards of each element of a batch, as JAX's callbacks do, all elements must be on the device.
    # So must they to leave out those that take no part.
    if not context.automatic:
        return ()
    levels, options = mask_levels(transforms), tap.options
    batchings = batches.batchings_of(public_transforms(transforms)) if levels is None else levels
    by_element = options.sharding == "local" and (options.kind.by_element or levels is not None)
    if not by_element or not batchings:
        return ()
    described = int(context.for_export)  # the description is the first array and has no batch axes
    return [
        [] if i < described
        else sorted(batches.batch_axes(len(aval.shape), [dims[i - described] for dims in batchings]).values())
        for i, aval in enumerate(avals)
    ]  # fmt: skip


def _on_one_device(context: compat.LoweringContext, tap: TapSpec) -> bool:
    # With some manual axes, each index along them has separate devices, and XLA has no first device.
    return ON_ONE_DEVICE in tap.options.params and context.automatic and not context.partially_manual


def _called(tap: TapSpec, transforms: tuple[Transform, ...], float0_leaves: Float0Leaves) -> Consumer:
    # Returns the tap as a call without results. Its id differs from the tap's, because equal ids mean equal consumers.
    consumer = tap.consumer(transforms, float0_leaves)
    consumer_id = tap.consumer_id((*transforms, ("call", None)), float0_leaves)
    return dataclasses.replace(
        consumer, consumer_id=consumer_id, sink=functools.partial(_call, consumer.sink)
    )


def _call(sink: Sink, message: Message) -> tuple[()]:
    sink(message)
    return ()


def _emit_on_one_device(emission: _Emission) -> compat.IrValue:
    context, avals, dtypes = emission.context, emission.avals, emission.dtypes
    specs = [ArraySpec.of(dtype, aval.shape) for dtype, aval in zip(dtypes, avals, strict=True)]
    prefix = encode_prefix(emission.consumer_id, int(Flags.CALL) | _flags(emission.tap), specs)
    ask = transport.callback_caller(context.platform, prefix, dtypes, [], context.devices())
    return compat.python_callback(context, ask, emission.token, emission.operands, avals, [])[0]


def _processes(context: compat.LoweringContext) -> list[int]:
    # The processes of the program's devices, in partition order; empty where JAX does not know the devices yet.
    return [device.process_index for device in context.devices() or ()]


def _shards(context: compat.LoweringContext) -> Shards | None:
    if not context.automatic:
        return None
    return "all" if set(_processes(context)) <= {jax.process_index()} else "some"


def _is_silent(context: compat.LoweringContext, tap: TapSpec, shards: Shards | None) -> bool:
    # Whether `processes="first"` switches the tap off in this process. If the compiler partitions a program of several
    # processes, collectors need the shards of all, and the sinks leave out what an earlier process has.
    if tap.options.processes != FIRST_PROCESS or context.for_export:
        return False
    if shards == "some" and tap.options.sharding == "global":
        return False
    processes = set(_processes(context))
    return jax.process_index() != (min(processes) if len(processes) > 1 else 0)


compat.register_lowering(tap_p, _lower)


def _describe(call: TapSpec, transforms: tuple[Transform, ...], consumer_id: int) -> TapDescriptor:
    return dataclasses.replace(call.describe(transforms, ()), consumer_id=consumer_id)


def _lower_call(
    ctx: compat.LoweringRuleContext,
    *operands: compat.IrValue,
    call: TapSpec,
    transforms: tuple[Transform, ...],
    result_avals: Sequence[compat.Aval],
    vmap_method: str | None,
) -> Sequence[compat.IrValue]:
    context = compat.LoweringContext(ctx)
    _check_program(context, call)
    # Before the program can run, since its first message needs a reader.
    transport.start(context.platform)
    inflight.expect(context.local_devices())
    effect_dispatch.expect_failures()
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
    avals: Sequence[compat.Aval] = ctx.avals_in
    dtypes = [np.dtype(aval.dtype) for aval in avals]
    specs = [ArraySpec.of(dtype, aval.shape) for dtype, aval in zip(dtypes, avals, strict=True)]
    prefix = encode_prefix(consumer.consumer_id, flags, specs)
    token = context.token_in(TAP_EFFECT)
    if native:
        attributes = {"prefix": np.frombuffer(prefix, np.uint8)}
        token_out, results = compat.custom_call_with_results(
            context, transport.FFI_CALL_TARGET, token, operands, ctx.avals_out, attributes
        )
    else:
        expected = [ArraySpec.of(np.dtype(aval.dtype), aval.shape) for aval in ctx.avals_out]
        ask = transport.callback_caller(context.platform, prefix, dtypes, expected, context.devices())
        # Before JAX 0.10, XLA refuses callbacks with results on one device that take a token.
        ask_token = None if context.automatic and not call.options.ordered else token
        token_out, results = compat.python_callback(
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


def _lower_where(
    ctx: compat.LoweringRuleContext, *operands: compat.IrValue, **params: Any
) -> Sequence[compat.IrValue]:
    return compat.lower_function(
        compat.LoweringContext(ctx), functools.partial(call_where, **params), operands
    )


for primitive in (call_p, masked_call_p):
    compat.lower_with_devices(primitive)
compat.register_lowering(masked_call_p, _lower_where)
compat.register_lowering(call_p, _lower_call)


def _keep_only_result(context: compat.LoweringContext, token: Any, result: Any, aval: compat.Aval) -> None:
    """Emits a call behind all taps that reads a program's only result.

    XLA:CPU's fusion of reductions (jaxlib 0.10) takes an array in with its readers, and removes it, also if the program
    returns it: compiling fails with "instruction is live and cannot be removed". A program reads its only result only
    for a side effect, such as a tap of its norm. A call with the result as operand is a reader that the fusion leaves.
    """
    if tuple(context.platforms) != ("cpu",) or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return  # keys are not reduced
    # The clock's handler takes any operands, and has no results here.
    if not transport.use_native("cpu"):
        compat.python_callback(context, lambda partition, value: (), token, [result], [aval], [])
    elif context.automatic:
        context.partitioned_call(partition.KEPT_NAME, token, [result], transport.FFI_CLOCK_TARGET)
    else:
        context.custom_call(transport.FFI_CLOCK_TARGET, token, [result], {})


effects.keep_only_result = _keep_only_result
