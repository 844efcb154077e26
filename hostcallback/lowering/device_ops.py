"""Lowers operations that read arrays in place (tests, statistics, copies), the clock, and the verdict about a call.

On CPUs a native handler keeps what it takes, in programs of one device. Elsewhere each failed call counts as the first.

The statistics of an array that the compiler divides among devices are, until it has done so, a custom call for which it
asks `_partition`: each device measures what it has, and its row is its part of the result.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering.partition import shard_starts
from hostcallback.primitives import device_ops, effects
from hostcallback.receiver.native import bindings as native_library

CALLBACK_INTERVAL_US = 20_000
"""Microseconds between two readings through Python, which take some 50 microseconds each."""


def _lower_clock(
    ctx: compat.LoweringRuleContext, step: compat.IrValue, *, alike: bool, timed: bool
) -> Sequence[compat.IrValue]:
    context = compat.LoweringContext(ctx)
    if not alike or (context.device_count == 1 and not context.is_replicated):
        return _read_clock(ctx, context, step)
    if not timed:
        return compat.lower_function(context, lambda step: [jnp.zeros(2, np.uint32)], [step])
    found = _read_clock(ctx, context, step)
    only_time = lambda reading: [reading * np.array([1, 0], np.uint32)]  # noqa: E731
    return compat.lower_function(context, only_time, found, ctx.avals_out)


def _read_clock(
    ctx: compat.LoweringRuleContext, context: compat.LoweringContext, step: compat.IrValue
) -> Sequence[compat.IrValue]:
    token = context.token_in(effects.TAP_EFFECT)
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
    _, results = compat.python_callback(context, _read, None, [step], ctx.avals_in, ctx.avals_out)
    return results


def _read(partition: Any, step: Any) -> tuple[np.ndarray[Any, Any]]:
    now_us = time.perf_counter_ns() // 1000 % (1 << 32)
    return (np.array([now_us, CALLBACK_INTERVAL_US], np.uint32),)


compat.register_lowering(device_ops.clock_p, _lower_clock)


NOT_FINITE_TARGET = "hostcallback_not_finite"
STATISTICS_TARGET = "hostcallback_statistics"
SHARE_TARGET = "hostcallback_share_statistics"
MERGE_TARGET = "hostcallback_merged_statistics"
COPY_TARGET = "hostcallback_copy"
EDGE_TARGET = "hostcallback_edge"
DIVIDED_EDGE_NAME = "hostcallback_divided_edge"
VERDICT_TARGET = "hostcallback_verdict"

NATIVE_DTYPES = ("bfloat16", "float16", "float32", "float64", "complex64", "complex128")
PARTITIONED_NAME = "hostcallback_partitioned_statistics"

COPIED_DTYPES = (
    *NATIVE_DTYPES, "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)  # fmt: skip


def _lower_not_finite(
    ctx: compat.LoweringRuleContext, *operands: compat.IrValue, groups: tuple[int, ...]
) -> Sequence[compat.IrValue]:
    attributes = {"groups": np.asarray(groups, np.int32)}
    reference = functools.partial(device_ops.reduce_not_finite, groups=groups)
    return _lower_reduction(ctx, operands, NOT_FINITE_TARGET, attributes, reference)


def tests(context: compat.LoweringContext, operands: Sequence[compat.IrValue]) -> compat.IrValue:
    """Emits one native call that tests arrays of booleans, and of numbers of `NATIVE_DTYPES`. On CPUs.

    Returns:
        bool [n]: for each array whether it has an element that is false or not finite.
    """
    _register()
    result = jax.core.ShapedArray((len(operands),), np.dtype(np.bool_))
    attributes = {"groups": np.arange(len(operands), dtype=np.int32)}
    return compat.pure_call(context, NOT_FINITE_TARGET, operands, [result], attributes)[0]


def _lower_statistics(ctx: compat.LoweringRuleContext, operand: compat.IrValue) -> Sequence[compat.IrValue]:
    return _lower_reduction(ctx, [operand], STATISTICS_TARGET, {}, device_ops.reduce_statistics)


def _lower_share_statistics(
    ctx: compat.LoweringRuleContext, operand: compat.IrValue, devices: int
) -> Sequence[compat.IrValue]:
    context = compat.LoweringContext(ctx)
    is_divided = context.automatic and not context.partially_manual and context.device_count == devices
    if not is_divided or not _is_native(context, ctx.avals_in, NATIVE_DTYPES):
        reference = functools.partial(device_ops.reduce_share_statistics, devices=devices)
        return compat.lower_function(context, reference, [operand])
    _register()
    return [compat.call_of_shares(context, PARTITIONED_NAME, operand, ctx.avals_out[0], str(devices))]


def _lower_merged_statistics(
    ctx: compat.LoweringRuleContext, operand: compat.IrValue, shapes: tuple[tuple[int, ...], ...]
) -> Sequence[compat.IrValue]:
    # Each device gets all rows, which is the one exchange, and merges them.
    reference = functools.partial(device_ops.reduce_merged_statistics, shapes=shapes)
    return _lower_reduction(ctx, [operand], MERGE_TARGET, {}, reference, divided=True)


def _partition(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], _: Any, __: Any, config: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # XLA calls this on one of its threads while it compiles.
    devices, [value] = int(config), arg_shapes
    sharding = compat.REPLICATED if arg_shardings[0].is_maximal() else arg_shardings[0]
    shape, tile = tuple(value.dimensions()), tuple(sharding.tile(value).dimensions())
    starts = shard_starts(len(shape), tile, sharding, range(devices))
    module = compat.call_of_a_share(
        SHARE_TARGET,
        {"shares": shares_of_shards(shape, tile, starts).ravel()},
        (tile, np.dtype(value.numpy_dtype())),
        (1, len(device_ops.STATISTICS) + 1),
    )
    return module, [sharding], compat.one_row_each(devices)


def shares_of_shards(
    shape: Sequence[int], tile: Sequence[int], starts: Sequence[Sequence[int]]
) -> np.ndarray[Any, Any]:
    """Returns which elements of its shard each partition measures, so that all measure each element once.

    Args:
        shape: of the whole array.
        tile: of the shards; shards at the end may be padded to it.
        starts: by partition, the start of its shard.

    Returns:
        int64, shape [partitions, 2 + rank]: first and end of the elements, and the shard's extents without padding.
    """
    holders: dict[tuple[int, ...], list[int]] = {}
    for partition, start in enumerate(starts):
        holders.setdefault(tuple(start), []).append(partition)
    table = np.zeros((len(starts), 2 + len(tile)), np.int64)
    for start, partitions in holders.items():
        extents = np.clip(np.subtract(shape, start), 0, tile)
        bounds = [math.prod(extents.tolist()) * i // len(partitions) for i in range(len(partitions) + 1)]
        for partition, begin, end in zip(partitions, bounds, bounds[1:], strict=False):
            table[partition] = (begin, end, *extents)
    return table


def _lower_copies(ctx: compat.LoweringRuleContext, *operands: compat.IrValue) -> Sequence[compat.IrValue]:
    # Elsewhere XLA copies what is read after it is written over.
    reference: Callable[..., Any] = lambda *arrays: [*arrays, *arrays]  # noqa: E731
    count = len(operands)
    return _lower_reduction(ctx, operands, COPY_TARGET, {}, reference, dtypes=COPIED_DTYPES, in_place=count)


def _lower_edge(ctx: compat.LoweringRuleContext, *operands: compat.IrValue) -> Sequence[compat.IrValue]:
    # A call that takes the arrays and returns them: XLA:CPU drops barriers before it fuses and orders operations.
    context = compat.LoweringContext(ctx)
    if tuple(context.platforms) != ("cpu",):
        raise NotImplementedError(
            f'what="time" is not yet confirmed on {", ".join(context.platforms)}: there the clock must be read on the '
            "device's stream (events), and not on the thread that enqueues its work; run the program on a CPU, or use "
            "jax.profiler"
        )
    if context.automatic:
        stamp: Any = ctx.avals_in[-1]
        is_whole_mesh = not context.partially_manual and stamp.shape[:-1] == (context.device_count,)
        if not (is_whole_mesh and transport.use_native("cpu") and compat.uses_shardy()):
            raise NotImplementedError(
                'what="time" measures what the compiler divides among devices on the native transport, with the Shardy '
                "partitioner, and not in a shard_map over some axes of the mesh only: time it as a program of one "
                "device, or in a shard_map over all axes"
            )
        _register()
        return compat.divided_edge(context, DIVIDED_EDGE_NAME, operands, ctx.avals_out)
    if transport.use_native("cpu"):
        _register()
        return compat.pure_call(context, EDGE_TARGET, operands, ctx.avals_out, {}, in_place=len(operands) - 2)
    _, results = compat.python_callback(context, _read_edge, None, operands, ctx.avals_in, ctx.avals_out)
    return results


def _partition_edge(
    arg_shapes: Sequence[Any], arg_shardings: Sequence[Any], result_shape: Any, _: Any, __: bytes
) -> tuple[bytes, Sequence[Any], Any]:
    # XLA calls this on one of its threads while it compiles. What goes through an edge stays divided as it is.
    devices = arg_shapes[-1].dimensions()[0]
    kept = [compat.REPLICATED if each.is_maximal() else each for each in arg_shardings[:-2]]
    given = [
        (tuple(sharding.tile(shape).dimensions()), np.dtype(shape.numpy_dtype()))
        for sharding, shape in zip(kept, arg_shapes, strict=False)
    ]
    stamp, seconds = ((1, 2), np.dtype(np.uint32)), ((1,), np.dtype(np.float32))
    module = compat.edge_of_a_device(EDGE_TARGET, [*given, stamp, stamp], [*given, stamp, seconds])
    rows = compat.one_row_each(devices)
    return module, [*kept, rows, rows], compat.rows_by_device(result_shape, kept, [(devices, 2), (devices,)])


def _read_edge(partition: Any, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
    *values, _, since = map(np.asarray, arrays)
    now = np.array([time.time_ns()], np.uint64)
    seconds = (now - since.view(np.uint64)).astype(np.int64)[0] * 1e-9
    return (*values, now.view(np.uint32), np.array(seconds, np.float32))


compat.register_lowering(device_ops.edge_p, _lower_edge)
compat.register_partitioner(DIVIDED_EDGE_NAME, _partition_edge)


def _lower_reduction(
    ctx: compat.LoweringRuleContext,
    operands: Sequence[compat.IrValue],
    target: str,
    attributes: dict[str, Any],
    reference: Callable[..., Any],
    *,
    dtypes: Sequence[str] = NATIVE_DTYPES,
    in_place: int = 0,
    divided: bool = False,
) -> Sequence[compat.IrValue]:
    # Of what the compiler divides among devices it gives a call the whole: only `divided` ones are worth that.
    context = compat.LoweringContext(ctx)
    is_allowed = not context.automatic or (divided and not context.partially_manual)
    if not is_allowed or not _is_native(context, ctx.avals_in, dtypes):
        return compat.lower_function(context, reference, operands)
    _register()
    return compat.pure_call(context, target, operands, ctx.avals_out, attributes, in_place=in_place)


def _is_native(context: compat.LoweringContext, avals: Sequence[compat.Aval], dtypes: Sequence[str]) -> bool:
    # Another process may lack the handlers.
    if context.for_export or tuple(context.platforms) != ("cpu",):
        return False
    return all(aval.dtype.name in dtypes for aval in avals) and transport.use_native("cpu")


@functools.cache
def _register() -> None:
    # Not called at import, because JAX reports a registration before the backend exists as a failure of the backend.
    library = native_library.load()
    handlers = {
        NOT_FINITE_TARGET: library.hcb_not_finite,
        STATISTICS_TARGET: library.hcb_statistics,
        SHARE_TARGET: library.hcb_share_statistics,
        MERGE_TARGET: library.hcb_merged_statistics,
        COPY_TARGET: library.hcb_copy,
        EDGE_TARGET: library.hcb_edge,
        VERDICT_TARGET: library.hcb_verdict,
    }
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")


compat.register_lowering(device_ops.not_finite_p, _lower_not_finite)
compat.register_lowering(device_ops.statistics_p, _lower_statistics)
compat.register_lowering(device_ops.share_statistics_p, _lower_share_statistics)
compat.register_lowering(device_ops.merged_statistics_p, _lower_merged_statistics)
compat.register_partitioner(PARTITIONED_NAME, _partition, lambda config: compat.one_row_each(int(config)))
compat.register_lowering(device_ops.copies_p, _lower_copies)


FINE, FIRST, FURTHER = range(3)
NOT_COUNTED = np.uint32(0xFFFFFFFF)
"""The number of a call where nothing counts them."""

verdict_p = compat.Primitive("verdict")
_seen: Counter[int] = Counter()  # programs, by their checksum
_seen_lock = threading.Lock()


def verdict(failed: jax.Array, program: str) -> Any:
    """Counts a call, and says whether it failed and whether it is the first of a series. In a whole program's trace.

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
    """Makes the next failing call of each program count as the first of a series. Any thread."""
    if transport.use_native("cpu"):
        native_library.load().hcb_verdict_forget()


def _reference(failed: jax.Array) -> list[Any]:
    first = jnp.where(jnp.any(failed), jnp.uint32(FIRST), jnp.uint32(FINE))
    return [jnp.stack([first, jnp.uint32(NOT_COUNTED)])]


def _lower_verdict(
    ctx: compat.LoweringRuleContext, failed: compat.IrValue, *, program: int
) -> Sequence[compat.IrValue]:
    context = compat.LoweringContext(ctx)
    if not _is_native(context, ctx.avals_in, ["bool"]) or context.manual or context.device_count > 1:
        return compat.lower_function(context, _reference, [failed])
    _register()
    attributes = {"program": np.asarray([program], np.int32)}
    return compat.pure_call(context, VERDICT_TARGET, [failed], ctx.avals_out, attributes)


verdict_p.def_abstract_eval(lambda failed, program: jax.core.ShapedArray((2,), np.dtype(np.uint32)))
compat.register_lowering(verdict_p, _lower_verdict)
