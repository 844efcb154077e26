"""Custom calls and Python callbacks with results; JAX's own callbacks, where `accelerate` takes them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    callback as _callback,  # emit_python_callback: the transport without the native handler; io_callback_p
    core as _core,  # ShapedArray, NamedAxisEffect
    custom_partitioning_sharding_rule as _rule,  # of Shardy, for a call: ArrayMapping, SdyShardingRule
    debugging as _debugging,  # debug_callback_p, debug_print_p, their effects
    effects as _effects,  # ordered_effects, JaxprInputEffect
    ffi as _ffi,  # ffi_batching_rule
    sharding_impls as _sharding_impls,  # SdyArray, SdyDim: shardings of lowered values
)
from jax._src.interpreters import mlir as _mlir  # lower_fun, register_lowering, wrap_with_sharding_op
from jax._src.lib.mlir import ir as _ir  # types of lowered values
from jax._src.lib.mlir.dialects import hlo as _hlo  # SliceOp, ReshapeOp, NotOp

from hostcallback._jax_compat import versions
from hostcallback._jax_compat.lowering import (
    LoweringContext,
    ffi_call,
    ir_type,
    partitioned_op,
    sharding_of_per_device_calls,
)
from hostcallback._jax_compat.types import (
    Aval,
    Effect,
    IrValue,
    JaxprEqn,
    LoweringRuleContext,
    Primitive,
    widened,
)


def batch_call(primitive: Primitive, args: Any, dims: Any, **params: Any) -> Any:
    """Batches an opaque call as `vmap_method` says, as JAX does it for `pure_callback` and `ffi_call` (0.8 to 0.12)."""
    return _ffi.ffi_batching_rule(primitive, args, dims, **params)


def custom_call_with_results(
    context: LoweringContext,
    name: str,
    token: IrValue,
    operands: Sequence[IrValue],
    results: Sequence[Aval],
    attributes: dict[str, Any],
) -> tuple[IrValue, list[IrValue]]:
    """As `LoweringContext.custom_call`, with row-major results of the avals `results`; returns token and results."""
    op = ffi_call(name, token, operands, [ir_type(context, aval) for aval in results], attributes)
    # JAX's helper takes avals, and the token is a result without one: a scalar stands for it (0.8 to 0.12).
    context.run_on_every_device(op, [_core.ShapedArray((), np.dtype(np.bool_)), *results])
    token_out, *outs = op.results
    return token_out, outs


def python_callback(
    context: LoweringContext,
    function: Callable[..., Any],
    token: IrValue | None,
    operands: Sequence[IrValue],
    avals: Sequence[Aval],
    results: Sequence[Aval],
) -> tuple[IrValue, list[IrValue]]:
    """Emits `function(partition, *operands)` on the device's execution thread; returns the new token and its results.

    `partition` is the index of the running device in the program's device list. Where the compiler partitions, only the
    first device calls, with whole arrays. The function returns arrays of the avals `results`, widened. Without a token
    it is in no order, and returns none.
    """
    index_aval = _core.ShapedArray((), np.dtype(np.uint32))
    operands = context.widen(operands, avals)
    avals_in = [index_aval, *(_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in avals)]
    avals_out = [_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in results]
    ctx = dataclasses.replace(
        context.raw, module_context=_module_of(context), avals_in=avals_in, avals_out=avals_out
    )
    sharding = sharding_of_per_device_calls(avals_out) if context.manual else None
    if context.automatic:
        sharding = context.sharding_of_one_device(avals_out)
    extra = {"returns_token": token is not None} if versions.CALLBACK_RETURNS_TOKEN else {}
    outs: Any
    outs, token_out, _ = _callback.emit_python_callback(
        ctx, function, token, [context.partition_index(), *operands], avals_in, avals_out,
        has_side_effect=True, sharding=sharding, **extra,
    )  # fmt: skip
    narrowed = [
        out if widened(aval.dtype) == aval.dtype else _hlo.convert(ir_type(context, aval), out)
        for out, aval in zip(outs, results, strict=True)
    ]
    return token_out, narrowed


def _module_of(context: LoweringContext) -> Any:
    # The module context, with a backend also where this machine has none of the platform.
    module = context.raw.module_context
    if context.backend_is_here():
        return module
    return module.replace(backend=_BackendElsewhere(context.platform), platforms=(context.platform,))


class _BackendElsewhere:
    # Stands for the backend of a platform that this machine lacks, when a program is lowered for it. JAX asks it for
    # nothing else (0.8 to 0.12); without it, lowering a Python callback raises that there is no such backend. The
    # program cannot run here: what the backend would remember of the callback is not needed.

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def make_python_callback_from_host_send_and_recv(self, *args: Any) -> None:
        return None


def pure_call(
    context: LoweringContext,
    name: str,
    operands: Sequence[IrValue],
    results: Sequence[Aval],
    attributes: dict[str, Any],
    *,
    in_place: int = 0,
) -> list[IrValue]:
    """Emits a typed-FFI call without side effects on row-major operands; its row-major results have these avals.

    The first `in_place` results are in the memory of the operands of the same number.
    """
    types = [ir_type(context, aval) for aval in results]
    op = ffi_call(name, None, operands, types, attributes, in_place=in_place)
    context.run_on_every_device(op, results)
    return list(op.results)


def element(vector: IrValue, index: int) -> tuple[IrValue, Aval]:
    """Emits one element of a boolean vector, a scalar; returns it and its type."""
    bounds = [_ir.DenseI64ArrayAttr.get([at]) for at in (index, index + 1, 1)]
    boolean = _ir.RankedTensorType.get([], _ir.IntegerType.get_signless(1))
    scalar = _hlo.ReshapeOp(boolean, _hlo.SliceOp(vector, *bounds).result).result
    return scalar, _core.ShapedArray((), np.dtype(np.bool_))


def call_of_shares(
    context: LoweringContext, name: str, operand: IrValue, result: Aval, config: str
) -> IrValue:
    """Emits a call without side effects that a partitioner registered as `name` replaces; returns its result.

    Each device has the row of its number of the result, whose aval has an axis of devices and another one.
    """
    [out] = partitioned_op(name, [ir_type(context, result)], [operand], config, has_side_effect=False)
    if not uses_shardy():
        return out  # GSPMD asks the partitioner for the sharding of the result
    return _one_row_each(context, out, result)


def uses_shardy() -> bool:
    """Whether Shardy divides programs among devices, and not GSPMD."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def _one_row_each(context: LoweringContext, value: IrValue, aval: Aval) -> IrValue:
    # Without it, Shardy has the result of a call on every device (0.8 to 0.12), and so a collective for each call. It
    # drops a sharding of the call itself.
    axes = (("d",), *(() for _ in aval.shape[1:]))
    dims = tuple(_sharding_impls.SdyDim(axes=each, is_open=False) for each in axes)
    mesh = (("d", aval.shape[0]),)
    sharding = _sharding_impls.SdyArray(mesh_shape=mesh, dim_shardings=dims, logical_device_ids=())
    constrain: Any = _mlir.wrap_with_sharding_op
    constrained: IrValue = constrain(context.raw, value, aval, sharding, allow_shardy_lowering=True)
    return constrained


def divided_edge(
    context: LoweringContext, name: str, operands: Sequence[IrValue], results: Sequence[Aval]
) -> list[IrValue]:
    """Emits a call without side effects that a partitioner registered as `name` replaces, as an edge (`edge_p`).

    The arrays that go through it are divided as they would be without it. Of the stamps, each device has its row.
    """
    types = [ir_type(context, aval) for aval in results]
    made = partitioned_op(name, types, operands, "", has_side_effect=False)
    factors = [
        [f"a{number}_{axis}" for axis in range(len(aval.shape))] for number, aval in enumerate(results)
    ]
    *arrays, stamp, _ = (_rule.ArrayMapping(*each) for each in factors)
    since = _rule.ArrayMapping(stamp[0], "since")
    rule = _rule.SdyShardingRule(
        operand_mappings=(*arrays, stamp, since),
        result_mappings=(*arrays, stamp, _rule.ArrayMapping(stamp[0])),
    )
    call: Any = made[0].owner
    call.attributes["sdy.sharding_rule"] = _rule.sdy_sharding_rule_to_mlir(
        rule, [operand.type for operand in operands], types
    )
    rows = zip(made[-2:], results[-2:], strict=True)
    return [*made[:-2], *(_one_row_each(context, value, aval) for value, aval in rows)]


def lower_function(
    context: LoweringContext,
    function: Callable[..., Any],
    operands: Sequence[IrValue],
    avals: Sequence[Aval] | None = None,
) -> Sequence[IrValue]:
    """Lowers what a function of arrays that returns a list of them traces to, in place of the equation.

    `avals` are those of the operands, if these are not the equation's own.
    """
    to_rule: Any = _mlir.lower_fun
    raw = context.raw if avals is None else context.raw.replace(avals_in=list(avals))
    results: Sequence[IrValue] = to_rule(function, multiple_results=True)(raw, *operands)
    return results


def call_when_run(primitive: Primitive, function: Callable[[], None]) -> None:
    """Makes a primitive without operands call `function` where its program runs; it returns an empty array."""
    aval = _core.ShapedArray((0,), np.dtype(np.uint8))
    extra: dict[str, Any] = {"returns_token": False} if versions.CALLBACK_RETURNS_TOKEN else {}

    def call() -> tuple[Any, ...]:
        function()
        return (np.zeros(0, np.uint8),)

    def lower(ctx: LoweringRuleContext) -> Any:
        return _callback.emit_python_callback(ctx, call, None, [], [], [aval], has_side_effect=True, **extra)[
            0
        ]

    primitive.def_abstract_eval(lambda: [aval])
    _mlir.register_lowering(primitive, lower)


def dispatch_synchronously(context: LoweringContext) -> None:
    """Makes the calling thread run CPU programs itself, and wait for their end, once their arguments are ready.

    XLA does so for programs with host callbacks, "to avoid deadlocks with reentrant callbacks" (0.8 to 0.12): a thread
    then has one of the 32 programs that a device has in flight at most. Without it, threads fill all slots with
    programs whose host functions wait for a slot: a deadlock. The callback added here is never called.
    """
    context.raw.module_context.add_host_callback(lambda *args: ())


_CALLBACKS: dict[str, tuple[Any, str, frozenset[str], frozenset[str]]] = {
    "jax.debug.callback": (
        _debugging, "debug_callback_p", frozenset({"callback", "effect", "partitioned"}), frozenset()
    ),
    "jax.debug.print": (
        _debugging, "debug_print_p",
        frozenset({"fmt", "ordered", "partitioned", "in_tree", "static_args", "np_printoptions", "has_placeholders"}),
        frozenset({"logging_record"}),  # from 0.10 on: `jax.debug.log`
    ),
    "io_callback": (
        _callback, "io_callback_p", frozenset({"callback", "result_avals", "sharding", "ordered"}), frozenset()
    ),
}  # fmt: skip
# By name: where the primitive is, and the parameters of its equations: in all versions, and in some (0.8 to 0.12).


def callback_primitive(name: str) -> Primitive:
    """The primitive that every call of that public function binds, however a library imported the function.

    Raises:
        LookupError: this JAX has none of that name.
    """
    module, attribute, _, _ = _CALLBACKS[name]
    primitive: Any = getattr(module, attribute, None)
    if not callable(getattr(primitive, "bind", None)):
        raise LookupError(f"{module.__name__} has no primitive {attribute}")
    found: Primitive = primitive
    return found


def check_callback_params(name: str, params: dict[str, Any]) -> None:
    """Raises LookupError where an equation of that primitive has parameters that this code does not know."""
    _, attribute, always, sometimes = _CALLBACKS[name]
    if not always <= set(params) <= always | sometimes:
        known = ", ".join(sorted(always | sometimes))
        raise LookupError(f"{attribute} has the parameters {', '.join(sorted(params))}, expected {known}")


def replace_bind(primitive: Any, bind: Callable[..., Any]) -> None:
    """Has `primitive.bind(...)` call `bind`.

    Every way to the primitive goes through it, tracing as well as the evaluation of a jaxpr (0.8 to 0.12). To replace
    the public functions instead would miss the libraries that imported them before.
    """
    primitive.bind = bind  # hides the method of the class


def restore_bind(primitive: Primitive, bind: Callable[..., Any]) -> None:
    """Undoes `replace_bind`. If other code has replaced `bind` since, ours stays below it and passes calls on."""
    if vars(primitive).get("bind") is bind:
        del primitive.bind


def acts_on_host(equation: JaxprEqn) -> bool:
    """Whether an equation has an effect, but for the use of an axis or of a reference: a tap, a print, a callback."""
    internal = (_core.NamedAxisEffect, _effects.JaxprInputEffect)
    return any(not isinstance(effect, internal) for effect in equation.effects)


def is_ordered_debug_effect(effect: Effect) -> bool:
    """Whether a debug callback with this effect keeps program order."""
    return bool(_effects.ordered_effects.contains(effect))


def callback_parts(flat: Any) -> tuple[Callable[..., Any], Any, dict[int, Any]]:
    """The user's function in a callback primitive's `callback`; the tree of its (args, kwargs); its static leaves.

    `_FlatCallback` of `io_callback`; for `debug_callback`, a closure over the three (0.8 to 0.12).

    Raises:
        LookupError: it is neither.
    """
    if isinstance(flat, _callback._FlatCallback):
        return flat.callback_func, flat.in_tree, {}
    names = getattr(getattr(flat, "__code__", None), "co_freevars", ())
    if set(names) != {"callback", "in_tree", "static_args"}:
        raise LookupError("its callback is not made as jax.debug.callback makes it")
    # The callback is a closure without public attributes: its cells are the only way to the user's function
    # (0.8 to 0.12).
    cells = {name: cell.cell_contents for name, cell in zip(names, flat.__closure__, strict=True)}
    return cells["callback"], cells["in_tree"], dict(cells["static_args"])


def debug_logger() -> Any:
    """The logger of `jax.debug.log`."""
    return _debugging.logger
