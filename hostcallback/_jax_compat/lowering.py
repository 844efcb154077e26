"""The context that JAX passes to lowering rules, under one interface in all versions, and calls lowered in it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    callback as _callback,  # shardings of Python callbacks
    effects as _effects,  # ordered_effects
    sharding_impls as _sharding_impls,  # the axis context in lowering rules
    xla_bridge as _xla_bridge,  # get_backend
)
from jax._src.interpreters import mlir as _mlir  # jaxpr_subcomp, TokenSet, set_sharding
from jax._src.lib.mlir import ir as _ir  # types of lowered values
from jax._src.lib.mlir.dialects import hlo as _hlo  # TokenType, PartitionIdOp

from hostcallback._jax_compat import versions
from hostcallback._jax_compat.types import (
    Aval,
    ClosedJaxpr,
    Effect,
    IrValue,
    LoweringRuleContext,
    Primitive,
    widened,
)


def register_lowering(primitive: Primitive, rule: Callable[..., Any], platform: str | None = None) -> None:
    """Registers a lowering rule that JAX may not cache: it depends on the place it is called in."""
    # JAX would lower equal equations once and call that function from several places, but each place has its
    # own token.
    _mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def lowering_platform(platform: str) -> str:
    """What JAX calls a device's platform when it lowers for it: `cuda` or `rocm` for a device of the platform `gpu`."""
    if platform != "gpu":
        return platform
    # Devices have the platform `gpu` for both (0.8 to 0.12).
    return str(getattr(_xla_bridge.get_backend(platform), "_raw_platform", platform))


class _Discharging(threading.local):
    depth = 0

    def __init__(self) -> None:
        # By effect: what the program on which the innermost of them works does at its end.
        self.at_end: dict[Effect, Callable[[LoweringContext, IrValue], IrValue]] = {}


_discharging = _Discharging()  # how many `lower_discharged` the thread is in


def lower_discharged(
    ctx: LoweringRuleContext,
    closed: ClosedJaxpr,
    args: Sequence[IrValue],
    effect_type: type[Effect],
    keep: Callable[[LoweringContext, IrValue, IrValue, Aval], object] | None = None,
) -> Sequence[IrValue]:
    """Lowers a closed jaxpr inline, with a fresh token for its effect of that type, dropped at the end.

    Its other ordered effects take their tokens from the surrounding program.

    Args:
        ctx: JAX's context.
        closed: the jaxpr.
        args: its lowered inputs.
        effect_type: see above.
        keep: called as `keep(context, token, result, aval)` with the last token if there is one result, and the program
            may read it where no tap does; None for nothing.
    """
    ordered = _effects.ordered_effects.filter_in(closed.jaxpr.effects)
    discharged = [effect for effect in ordered if isinstance(effect, effect_type)]
    others = [effect for effect in ordered if not isinstance(effect, effect_type)]
    tokens = _mlir.TokenSet(
        {**dict(_mlir.TokenSet.create(discharged).items()), **{e: ctx.tokens_in.get(e) for e in others}}
    )
    extra: dict[str, Any] = {"outer_traceback": None} if versions.SUBCOMP_TAKES_TRACEBACK else {}
    _discharging.depth += 1
    outer, _discharging.at_end = _discharging.at_end, {}
    try:
        outs: Any
        outs, tokens = _mlir.jaxpr_subcomp(
            ctx.module_context, closed.jaxpr, ctx.name_stack, tokens, [_mlir.ir_constant(c) for c in closed.consts],
            *args, dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering, **extra,
        )  # fmt: skip
        for effect, emit in _discharging.at_end.items():
            if effect in tokens.effects():
                emit(LoweringContext(ctx), tokens.get(effect))
        if keep is not None and len(outs) == 1 and _may_be_read(outs[0]):
            token = tokens.get(discharged[-1]) if discharged else _hlo.create_token()
            keep(LoweringContext(ctx), token, outs[0], closed.out_avals[0])
    finally:
        _discharging.depth -= 1
        _discharging.at_end = outer
    if others:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens.subset(others)))
    results: Sequence[IrValue] = outs
    return results


FUSED_ELEMENTS = 1024
"""XLA:CPU fuses reductions of larger arrays in that way."""


def _may_be_read(result: Any) -> bool:
    # Whether something may read it once XLA has simplified the program, and no side effect does.
    if not isinstance(result, _ir.OpResult):  # an input, or several values
        return False
    readers = [use.owner.operation for use in result.uses]
    calls = [reader for reader in readers if reader.name == "stablehlo.custom_call"]
    if any(_is_token(made) for call in calls for made in call.results):
        return False
    return bool(readers) or math.prod(_ir.RankedTensorType(result.type).shape) >= FUSED_ELEMENTS


def _is_token(value: Any) -> bool:
    return str(value.type) == "!stablehlo.token"


class LoweringContext:
    """What a tap's lowering rule needs of JAX's lowering context, `raw`, under one name in all versions.

    `manual`: whether the equation is inside shard_map or pmap, so that each device runs its own.
    """

    def __init__(self, ctx: LoweringRuleContext) -> None:
        """Wraps the context that JAX passes to a lowering rule."""
        self.raw = ctx
        self.axis_context: Any = ctx.module_context.axis_context
        self.manual = isinstance(self.axis_context, _sharding_impls.SPMDAxisContext)

    @property
    def platforms(self) -> Sequence[str]:
        """The platforms the equation is lowered for, at once."""
        return tuple(self.raw.platforms or self.raw.module_context.platforms)

    @property
    def platform(self) -> str:
        """The first of them, such as `cpu`."""
        return str(self.platforms[0])

    @property
    def for_export(self) -> bool:
        """Whether the program is lowered to be run by other processes (`jax.export`)."""
        return bool(self.raw.module_context.lowering_parameters.for_export)

    def constant(self, value: np.ndarray[Any, Any]) -> IrValue:
        """Embeds an array in the program as a constant."""
        return _mlir.ir_constant(value)

    @property
    def partially_manual(self) -> bool:
        """Whether the compiler still partitions some axes of the mesh, inside shard_map."""
        return self.manual and self.axis_context.manual_axes != frozenset(self.axis_context.mesh.axis_names)

    @property
    def automatic(self) -> bool:
        """Whether the compiler partitions the equation's operands, over some axes at least."""
        return self.partially_manual or (not self.manual and self.device_count > 1)

    @property
    def partly_manual_mesh(self) -> list[tuple[int, bool]]:
        """Size of each mesh axis and whether it is manual; no axes where all of the mesh is the compiler's."""
        if not self.manual:
            return []
        mesh = self.axis_context.mesh
        return [(int(size), name in self.axis_context.manual_axes) for name, size in mesh.shape.items()]

    @property
    def is_replicated(self) -> bool:
        """Whether every device of a pmap runs the whole program, which is then not partitioned."""
        return isinstance(self.axis_context, versions.ReplicaAxisContext)

    @property
    def device_count(self) -> int:
        """Over how many devices the program is partitioned, by the compiler or by hand; 1 for none."""
        if self.manual:
            return int(self.axis_context.mesh.size)
        return getattr(self.axis_context, "num_devices", 1)

    def devices(self) -> list[jax.Device] | None:
        """The program's devices in partition order; None where JAX does not know them yet."""
        context = self.axis_context
        if self.manual and not isinstance(context.mesh, jax.sharding.AbstractMesh):  # that one refuses to say
            found = getattr(context.mesh, "_flat_devices_tuple", None)
            if found is None:
                found = getattr(context.mesh, "devices", None)
                found = None if found is None else list(found.flat)
            if found is not None:
                return list(found)
        assigned = getattr(context, "device_assignment", None)
        return None if assigned is None else list(assigned)

    def local_devices(self) -> list[jax.Device]:
        """This process's devices among the program's, or all of the platform's where JAX does not know them."""
        devices = self.devices()
        if devices is None:
            return list(jax.local_devices(backend=self.platform)) if self.backend_is_here() else []
        here = jax.process_index()
        return [device for device in devices if device.process_index == here]

    def keep_alive(self, value: Any) -> None:
        """Keeps `value` alive as long as the compiled program."""
        self.raw.module_context.add_keepalive(value)

    @property
    def kept_alive(self) -> int:
        """How many values the program keeps alive so far."""
        return len(self.raw.module_context.keepalives)

    def avoid_persistent_cache(self) -> None:
        """Keeps JAX from writing a program to the persistent cache, where jaxlib would crash on it.

        It does for a program for several devices that takes tokens, as one with an ordered effect does, see
        `versions`. JAX does not cache programs with host callbacks; this one is never called.
        """
        affected = versions.PERSISTENT_CACHE_CRASHES_ON_TOKENS and self.device_count > 1
        if affected and not _discharging.depth:
            self.raw.module_context.add_host_callback(lambda *args: ())

    def token_in(self, effect: Effect) -> IrValue:
        """The token that the equation must wait for: the one JAX threads for the effect, or else the block's own."""
        if effect in self.raw.tokens_in.effects():
            return self.raw.tokens_in.get(effect)
        # The last token that a call in this block of code made.
        result: IrValue
        for op in reversed(list(_ir.InsertionPoint.current.block.operations)):
            if op.operation.name == "stablehlo.custom_call":
                for result in op.results:
                    if _is_token(result):
                        return result
        return _hlo.create_token()

    def set_token_out(self, effect: Effect, token: IrValue) -> None:
        """The token that later equations wait for."""
        if effect in self.raw.tokens_in.effects():
            self.raw.set_tokens_out(self.raw.tokens_in.update_tokens(_mlir.TokenSet({effect: token})))

    def at_end(self, effect: Effect, emit: Callable[[LoweringContext, IrValue], IrValue]) -> bool:
        """Has `emit(context, token)` called, once, where the whole program has been lowered, with its last token.

        Returns whether it will be: without fast dispatch it is not.
        """
        if _discharging.depth:
            _discharging.at_end[effect] = emit
        return bool(_discharging.depth)

    def unless(self, predicate: IrValue, token: IrValue, emit: Callable[[], IrValue]) -> IrValue:
        """Emits a branch that does what `emit` does, unless all of a boolean array holds; returns the new token."""
        branch = _hlo.IfOp([_hlo.TokenType.get()], _all(predicate))
        with _ir.InsertionPoint(branch.regions[0].blocks.append()):
            _hlo.return_([token])
        with _ir.InsertionPoint(branch.regions[1].blocks.append()):
            _hlo.return_([emit()])
        token_out: IrValue = branch.results[0]
        return token_out

    def negated(self, array: IrValue) -> IrValue:
        """A boolean array with the other values."""
        return _hlo.NotOp(array).result

    def custom_call(
        self, name: str, token: IrValue, operands: Sequence[IrValue], attributes: dict[str, Any]
    ) -> IrValue:
        """Emits a side-effecting typed-FFI call on a token and row-major operands; returns its token."""
        op = ffi_call(name, token, operands, [], attributes)
        self.run_on_every_device(op, [])
        token_out: IrValue = op.results[0]
        return token_out

    def partitioned_call(
        self, name: str, token: IrValue, operands: Sequence[IrValue], config: str
    ) -> IrValue:
        """Emits a side-effecting call that a partitioner registered as `name` replaces; returns its token."""
        types = [_hlo.TokenType.get()]
        return partitioned_op(name, types, [token, *operands], config, has_side_effect=True)[0]

    def add_python_callback(self, function: Callable[..., Any]) -> tuple[str, int]:
        """Attaches `function(*operands)` to the program, for a call on a token that is made elsewhere.

        Returns:
            The call's target and the callback's number, its attribute `index` (0.8 to 0.12).
        """

        def on_token(token: IrValue, *operands: IrValue) -> tuple[IrValue, ...]:
            function(*operands)
            return (token,)

        module = self.raw.module_context
        module.add_host_callback(on_token)
        device = "cpu" if self.platform == "cpu" else "gpu"
        return f"xla_ffi_python_{device}_callback", len(module.host_callbacks) - 1

    def widen(self, operands: Sequence[IrValue], avals: Sequence[Aval]) -> list[IrValue]:
        """Converts operands to the dtypes that `widened` returns."""
        # JAX 0.8.0 hands packed elements of less than a byte to Python as they lie: without this, values are wrong.
        return [_widen(operand, aval) for operand, aval in zip(operands, avals, strict=True)]

    def sharding_of_one_device(self, avals: Sequence[Aval]) -> Any:
        """The sharding of a Python callback with such results that the program's first device calls (0.8 to 0.12).

        XLA's partitioner refuses every other custom call on one device.

        Raises:
            NotImplementedError: some axes of the mesh are manual.
        """
        return _callback._callback_op_sharding(self.axis_context, None, avals)

    def run_on_every_device(self, op: Any, results: Sequence[Aval]) -> None:
        """Where each device runs its own call, has XLA's partitioner leave the call as it is.

        Args:
            op: the call.
            results: its avals.
        """
        if not self.manual:
            return
        sharding = sharding_of_per_device_calls(results)
        set_sharding: Any = _mlir.set_sharding
        if versions.SET_SHARDING_TAKES_CONTEXT:
            set_sharding(self.raw.module_context, op, sharding)
        else:
            set_sharding(op, sharding)

    def backend_is_here(self) -> bool:
        """Whether this machine has devices of the platform."""
        try:
            self.raw.module_context.get_backend()
        except (RuntimeError, ValueError):  # not on this machine; another one than the program was traced for
            return False
        return True

    def partition_index(self) -> IrValue:
        """Emits the index of the running device in the program's device list."""
        if self.is_replicated:
            return _hlo.ReplicaIdOp().result
        if self.manual:
            return _hlo.PartitionIdOp().result
        return _mlir.ir_constant(np.uint32(0))


def ffi_call(
    name: str,
    token: IrValue | None,
    operands: Sequence[IrValue],
    result_types: Sequence[Any],
    attributes: dict[str, Any],
    *,
    in_place: int = 0,
) -> Any:
    """Emits a typed-FFI call, with a side effect if there is a token, which comes first in operands and results.

    The first `in_place` results are in the memory of the operands of the same number.
    """
    tokens = [] if token is None else [token]
    return _mlir.custom_call(
        name,
        result_types=[*(_hlo.TokenType.get() for _ in tokens), *result_types],
        operands=[*tokens, *operands],
        has_side_effect=bool(tokens),
        api_version=4,
        backend_config={key: _mlir.ir_attribute(value) for key, value in attributes.items()},
        # Row-major, which XLA would otherwise be free to change: frames hold row-major arrays.
        operand_layouts=[*(() for _ in tokens), *(_row_major(operand.type) for operand in operands)],
        result_layouts=[*(() for _ in tokens), *map(_row_major, result_types)],
        operand_output_aliases={i: i for i in range(in_place)} or None,
    )


def _row_major(array_type: Any) -> tuple[int, ...]:
    return tuple(reversed(range(len(_ir.RankedTensorType(array_type).shape))))


def partitioned_op(
    name: str, result_types: Sequence[Any], operands: Sequence[IrValue], config: str, *, has_side_effect: bool
) -> list[IrValue]:
    """Emits a call that a partitioner registered as `name` replaces; returns its results."""
    op = _hlo.CustomCallOp(
        result_types,
        operands,
        call_target_name=_ir.StringAttr.get(name),
        has_side_effect=_ir.BoolAttr.get(has_side_effect),
        api_version=_mlir.i32_attr(2),
        called_computations=_ir.ArrayAttr.get([]),
        backend_config=_ir.StringAttr.get(config),
        operand_layouts=None,
        result_layouts=None,
    )
    return list(op.results)


def _all(predicate: IrValue) -> IrValue:
    rank = len(_ir.RankedTensorType(predicate.type).shape)
    if not rank:
        return predicate
    scalar = _ir.RankedTensorType.get([], _ir.IntegerType.get_signless(1))
    dimensions = _ir.DenseI64ArrayAttr.get(range(rank))
    reduce = _hlo.ReduceOp([scalar], [predicate], [_mlir.ir_constant(np.bool_(True))], dimensions)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with _ir.InsertionPoint(block):
        _hlo.return_([_hlo.AndOp(*block.arguments).result])
    result: IrValue = reduce.results[0]
    return result


def ir_type(context: LoweringContext, aval: Aval) -> Any:
    """The type of lowered values of an aval."""
    to_type: Any = _mlir.aval_to_ir_type
    return (
        to_type(context.raw.module_context, aval) if versions.AVAL_TO_IR_TYPE_TAKES_CONTEXT else to_type(aval)
    )


def sharding_of_per_device_calls(avals: Iterable[Aval]) -> Any:
    """The sharding of a call that each device runs for itself: replicated and "manual" (0.8 to 0.12 under Shardy)."""
    return _callback._get_sdy_array_list_for_callbacks(list(avals))


def _widen(operand: IrValue, aval: Aval) -> IrValue:
    if widened(aval.dtype) == aval.dtype:
        return operand
    element = _mlir.dtype_to_ir_type(widened(aval.dtype))
    return _hlo.ConvertOp(_ir.RankedTensorType.get(aval.shape, element), operand).result
