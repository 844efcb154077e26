"""Every private or version-dependent JAX name this package uses, with the versions and the reason.

Checked on JAX 0.8.0, 0.10.2 and 0.12.0.1. Nothing else in the package may import `jax._src` or `jaxlib`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    array as _array,  # ArrayImpl: the type of concrete arrays, checked on the dispatch path
    callback as _callback,  # emit_python_callback: the transport of platforms without the native handler
    core as _core,  # eval_jaxpr, trace_ctx: not in jax.extend.core
    dispatch as _dispatch,  # runtime_tokens: what a thread's dispatched computations can be waited on by
    effects as _effects,  # effect types can be registered nowhere else
    sharding_impls as _sharding_impls,  # the axis context in lowering rules
    util as _util,  # weakref_cache_key_types
)
from jax._src.interpreters import (
    mlir as _mlir,  # jaxpr_subcomp, TokenSet, set_sharding
    partial_eval as _pe,  # dce_rules
)
from jax._src.lib.mlir import ir as _ir  # types of lowered values
from jax._src.lib.mlir.dialects import hlo as _hlo  # TokenType, PartitionIdOp

Effect: Any = _effects.Effect
ArrayImpl: Any = _array.ArrayImpl


def register_ordered_effect(effect_type: type[Any]) -> None:
    """Allows an effect everywhere JAX lets one in, ordered, also on several devices (0.8 and later)."""
    for types in (
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.partial_eval_kept_effects,
        _effects.ordered_effects,
        _effects.shardable_ordered_effects,
    ):
        types.add_type(effect_type)


def thread_tokens() -> dict[str, Any]:
    """The calling thread's runtime tokens: a dict that lives as long as the thread and stays current.

    `RuntimeTokenSet` is a `threading.local` (0.4 to 0.12); its `current_tokens` maps each ordered effect to
    the token of the last computation that the thread dispatched with it.
    """
    return _dispatch.runtime_tokens.__dict__


def tokens_of(tokens: dict[str, Any], effect: Any) -> list[jax.Array]:
    """The arrays to wait on for what a thread dispatched with `effect`."""
    token = dict(tokens.get("current_tokens", {})).get(effect)
    buffer = getattr(token, "_buf", None)
    return [] if buffer is None else [buffer]


# `trace_context.trace is eval_trace` says that the calling thread is outside every JAX transformation and trace
# (0.8 to 0.12). `trace_context.is_top_level()` says the same in six times the time, which every call would pay.
trace_context: Any = _core.trace_ctx
eval_trace: Any = _core.eval_trace


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is in force on this thread."""
    config: Any = jax.config  # the attribute exists in every version, and its annotation in none
    return bool(config.jax_disable_jit)


def eval_jaxpr(closed: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr."""
    return _core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def keep_when_unused(primitive: Any) -> None:
    """Makes dead-code elimination keep every equation of an effect-free primitive."""
    # 0.12 passes one argument more in front; the equation is last in every version.
    _pe.dce_rules[primitive] = lambda *args: ([True] * len(args[-1].invars), args[-1])


_HOISTING = ("_scan_known_hoisting", "_scan_partial_eval_custom")


def never_hoist_from_loops(primitive: Any) -> None:
    """Keeps an effectful primitive inside the scans it was written in under differentiation.

    JAX (0.8 to 0.12) moves what depends on a scan's constants only out of the scan, and with it effectful equations,
    which then fire once (jax#16637). That pass is a partial evaluation like any other; only the functions that run
    it tell it apart.
    """

    def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
        if _runs_in(_HOISTING):
            tracers = tuple(trace.instantiate_const(tracer) for tracer in tracers)
        return trace.default_process_primitive(primitive, tracers, params)

    _pe.custom_partial_eval_rules[primitive] = rule


def _runs_in(functions: Sequence[str]) -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__", "").startswith(
            "jax._src.lax"
        ):
            return True
        frame = frame.f_back
    return False


_SUBCOMP_TAKES_TRACEBACK = "outer_traceback" in inspect.signature(_mlir.jaxpr_subcomp).parameters  # from 0.9


def lower_discharged(ctx: Any, closed: Any, args: Sequence[Any], effect_type: type[Any]) -> Sequence[Any]:
    """Lowers a closed jaxpr inline, with a fresh token for its effect of that type, dropped at the end.

    Its other ordered effects take their tokens from the surrounding program.
    """
    ordered = _effects.ordered_effects.filter_in(closed.jaxpr.effects)
    discharged = [effect for effect in ordered if isinstance(effect, effect_type)]
    others = [effect for effect in ordered if not isinstance(effect, effect_type)]
    tokens = _mlir.TokenSet(
        {**dict(_mlir.TokenSet.create(discharged).items()), **{e: ctx.tokens_in.get(e) for e in others}}
    )
    extra: dict[str, Any] = {"outer_traceback": None} if _SUBCOMP_TAKES_TRACEBACK else {}
    outs, tokens = _mlir.jaxpr_subcomp(
        ctx.module_context, closed.jaxpr, ctx.name_stack, tokens, [_mlir.ir_constant(c) for c in closed.consts],
        *args, dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering, **extra,
    )  # fmt: skip
    if others:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens.subset(others)))
    return outs


def has_effect(closed: Any, effect_type: type[Any]) -> bool:
    """Whether a closed jaxpr has an effect of that type."""
    return any(isinstance(effect, effect_type) for effect in closed.effects)


def has_input_effect(closed: Any) -> bool:
    """Whether a closed jaxpr reads or writes references that it takes as arguments."""
    return any(isinstance(effect, _effects.JaxprInputEffect) for effect in closed.effects)


def constants_to_inputs(closed: Any) -> tuple[Any, list[Any]]:
    """The same program with its constants as leading inputs, and those constants."""
    jaxpr = _pe.convert_constvars_jaxpr(closed.jaxpr)
    return _pe.close_jaxpr(jaxpr), list(closed.consts)


def cache_weakly(key_type: type[Any]) -> None:
    """Keeps JAX's caches from keeping equation parameters of that type alive.

    `_cached_abstract_eval` and others (0.8 to 0.12) hold their keys strongly unless the type is one of these.
    """
    _util.weakref_cache_key_types.add(key_type)


def lower_with_devices(primitive: Any) -> None:
    """Makes JAX tell the primitive's lowering rule which devices the program is for."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


# pmap until 0.8 runs replicas; later it is a jitted shard_map.
_ReplicaAxisContext: Any = getattr(_sharding_impls, "ReplicaAxisContext", ())


_SET_SHARDING_TAKES_CONTEXT = len(inspect.signature(_mlir.set_sharding).parameters) == 3  # from 0.10


class LoweringContext:
    """What a tap's lowering rule needs of JAX's lowering context, under one name in all versions."""

    def __init__(self, ctx: Any) -> None:
        """Wraps the context that JAX passes to a lowering rule."""
        self.raw = ctx
        self.axis_context = ctx.module_context.axis_context

    @property
    def platform(self) -> str:
        """The platform the program is lowered for, such as `cpu`."""
        return str(self.raw.module_context.platforms[0])

    @property
    def manual(self) -> bool:
        """Whether the equation is inside shard_map or pmap, so that each device runs its own."""
        return isinstance(self.axis_context, _sharding_impls.SPMDAxisContext)

    @property
    def partially_manual(self) -> bool:
        """Whether some axes of the mesh are still partitioned by the compiler."""
        return self.manual and self.axis_context.manual_axes != frozenset(self.axis_context.mesh.axis_names)

    @property
    def automatic_devices(self) -> int:
        """Over how many devices the compiler partitions the program; 1 for none."""
        if self.manual:
            return int(self.axis_context.mesh.size)
        return getattr(self.axis_context, "num_devices", 1)

    def devices(self) -> list[Any] | None:
        """The program's devices in partition order; None where JAX does not know them yet."""
        context = self.axis_context
        if self.manual:
            found = getattr(context.mesh, "_flat_devices_tuple", None)
            if found is None:
                found = getattr(context.mesh, "devices", None)
                found = None if found is None else list(found.flat)
            if found is not None:
                return list(found)
        assigned = getattr(context, "device_assignment", None)
        return None if assigned is None else list(assigned)

    def keep_alive(self, value: Any) -> None:
        """Keeps `value` alive as long as the compiled program."""
        self.raw.module_context.add_keepalive(value)

    def token_in(self, effect: Any) -> Any:
        """The token that the equation must wait for."""
        return self.raw.tokens_in.get(effect)

    def set_token_out(self, effect: Any, token: Any) -> None:
        """The token that later equations wait for."""
        self.raw.set_tokens_out(self.raw.tokens_in.update_tokens(_mlir.TokenSet({effect: token})))

    def custom_call(self, name: str, token: Any, operands: Sequence[Any], attributes: dict[str, Any]) -> Any:
        """Emits a side-effecting typed-FFI call on a token and row-major operands; returns its token."""
        ranks = [len(_ir.RankedTensorType(operand.type).shape) for operand in operands]
        op = _mlir.custom_call(
            name,
            result_types=[_hlo.TokenType.get()],
            operands=[token, *operands],
            has_side_effect=True,
            api_version=4,
            backend_config={key: _mlir.ir_attribute(value) for key, value in attributes.items()},
            operand_layouts=[(), *(tuple(range(rank - 1, -1, -1)) for rank in ranks)],
            result_layouts=[()],
        )
        if self.manual:
            self._run_on_every_device(op)
        return op.results[0]

    def _run_on_every_device(self, op: Any) -> None:
        sharding = _sharding_of_per_device_calls([])
        set_sharding: Any = _mlir.set_sharding
        if _SET_SHARDING_TAKES_CONTEXT:
            set_sharding(self.raw.module_context, op, sharding)
        else:
            set_sharding(op, sharding)

    def python_callback(
        self, function: Callable[..., Any], token: Any, operands: Sequence[Any], avals: Sequence[Any]
    ) -> Any:
        """Emits `function(partition, *operands)` on the device's execution thread; returns the new token.

        `partition` is the index of the running device in the program's device list.
        """
        index_aval = _core.ShapedArray((), np.dtype(np.uint32))
        # JAX 0.8.0 hands packed elements of less than a byte to Python as they lie.
        operands = [_widen(operand, aval) for operand, aval in zip(operands, avals, strict=True)]
        avals = [_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in avals]
        ctx = dataclasses.replace(self.raw, avals_in=[index_aval, *avals], avals_out=[])
        sharding = _sharding_of_per_device_calls([]) if self.manual else None
        _, token, _ = _callback.emit_python_callback(
            ctx, function, token, [self._partition(), *operands], [index_aval, *avals], [],
            has_side_effect=True, sharding=sharding,
        )  # fmt: skip
        return token

    def _partition(self) -> Any:
        if isinstance(self.axis_context, _ReplicaAxisContext):
            return _hlo.ReplicaIdOp().result
        if self.manual:
            return _hlo.PartitionIdOp().result
        return _mlir.ir_constant(np.uint32(0))


def _sharding_of_per_device_calls(avals: Iterable[Any]) -> Any:
    # Replicated "manual" sharding for a call without array results (0.8 to 0.12 under Shardy).
    return _callback._get_sdy_array_list_for_callbacks(list(avals))


def widened(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a value reaches a Python callback: whole bytes, every value kept."""
    name = np.dtype(dtype).name
    if name.startswith("float4"):
        return np.dtype(np.float32)
    if name in ("int1", "int2", "int4"):
        return np.dtype(np.int8)
    return np.dtype(np.uint8 if name in ("uint1", "uint2", "uint4") else dtype)


def _widen(operand: Any, aval: Any) -> Any:
    if widened(aval.dtype) == aval.dtype:
        return operand
    element = _mlir.dtype_to_ir_type(widened(aval.dtype))
    return _hlo.ConvertOp(_ir.RankedTensorType.get(aval.shape, element), operand).result


def register_lowering(primitive: Any, rule: Callable[..., Any], platform: str | None = None) -> None:
    """Registers a lowering rule. It may not be cached: it depends on the axis context it is called in."""
    _mlir.register_lowering(primitive, rule, platform=platform)


def uint8_attribute(data: bytes) -> Any:
    """Bytes as an FFI attribute."""
    return np.frombuffer(data, np.uint8)
