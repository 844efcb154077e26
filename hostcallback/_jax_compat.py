"""Every private or version-dependent JAX name this package uses, with the versions and the reason.

Checked on JAX 0.8.0, 0.10.2 and 0.12.0.1. Nothing else in the package may import `jax._src` or `jaxlib`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, cast

import jax
import numpy as np
from jax._src import (
    ad_checkpoint as _ad_checkpoint,  # remat_p
    api as _api,  # _post_hook_state: what is called after each jitted call
    api_util as _api_util,  # fun_sourceinfo
    array as _array,  # ArrayImpl: the type of concrete arrays, checked on the dispatch path
    callback as _callback,  # emit_python_callback: the transport of platforms without the native handler
    config as _config,  # bool_flag, int_flag: flags that JAX has no more; debug_nans, which shares a hook with us
    core as _core,  # eval_jaxpr, trace_ctx: not in jax.extend.core
    custom_partitioning as _custom_partitioning,  # its lowering rule
    debugging as _debugging,  # debug_callback_p, debug_print_p: what `accelerate` takes over
    dispatch as _dispatch,  # runtime_tokens: what a thread's dispatched computations can be waited on by
    distributed as _distributed,  # global_state.client: what the processes of a program share
    effects as _effects,  # effect types can be registered nowhere else
    ffi as _ffi,  # ffi_batching_rule
    shard_map as _shard_map,  # shard_map_p
    sharding_impls as _sharding_impls,  # the axis context in lowering rules
    source_info_util as _source_info_util,  # user_frames
    util as _util,  # weakref_cache_key_types
    xla_bridge as _xla_bridge,  # register_plugin_callbacks
)
from jax._src.interpreters import (
    ad as _ad,  # Zero.from_primal_value
    batching as _batching,  # batch_jaxpr2
    mlir as _mlir,  # jaxpr_subcomp, TokenSet, set_sharding
    partial_eval as _pe,  # dce_rules, lower_jaxpr
    pxla as _pxla,  # _discharge_internal_refs
)
from jax._src.lax.control_flow import loops as _loops  # _scan_known_hoisting
from jax._src.lib import (  # jax_jit; register_custom_call_partitioner, HloSharding
    xla_client as _xla_client,  # jax_jit, HloSharding, execution_stream_id
)
from jax._src.lib.mlir import ir as _ir  # types of lowered values
from jax._src.lib.mlir.dialects import func as _func, hlo as _hlo  # FuncOp; TokenType, PartitionIdOp

Effect: Any = _effects.Effect
ArrayImpl: Any = _array.ArrayImpl


def register_effect(effect_type: type[Any], *, ordered: bool) -> None:
    """Allows an effect everywhere JAX lets one in; ordered ones also on several devices (0.8 and later)."""
    allowed = [
        _effects.lowerable_effects,
        _effects.control_flow_allowed_effects,
        _effects.remat_allowed_effects,
        _effects.custom_derivatives_allowed_effects,
        _effects.partial_eval_kept_effects,
    ]
    if ordered:
        allowed += [_effects.ordered_effects, _effects.shardable_ordered_effects]
    for types in allowed:
        types.add_type(effect_type)


TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS = jax.__version_info__ >= (0, 12)
"""Seen to abort in XLA's `HloSharding::Validate` on 0.8.0, 0.10.2 and 0.11.0, and to work on 0.12.0.1."""


def in_partially_manual_region() -> bool:
    """Whether the calling thread traces the body of a shard_map that leaves some axes to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and not mesh.are_all_axes_manual


def thread_tokens() -> dict[str, Any]:
    """The calling thread's runtime tokens: a dict that lives as long as the thread and stays current.

    `RuntimeTokenSet` is a `threading.local` (0.4 to 0.12); its `current_tokens` maps each ordered effect to
    the token of the last computation that the thread dispatched with it.
    """
    return _dispatch.runtime_tokens.__dict__


def asks_for_token(frame: FrameType | None) -> bool:
    """Whether a frame is part of JAX's look for a token at the start of a dispatch.

    `RuntimeTokenSet.get_token_input` (0.8 to 0.12) calls the effect's hash, as other places do.
    """
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name == "get_token_input":
            return True
        frame = frame.f_back
    return False


def ordered_tokens(tokens: dict[str, Any], effect: Any) -> list[jax.Array]:
    """The array to wait on for what a thread dispatched with the ordered `effect`: one or none."""
    buffer = getattr(dict(tokens.get("current_tokens", {})).get(effect), "_buf", None)
    return [] if buffer is None else [buffer]


def wait_for_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the last program with any effect that a thread dispatched to each device; whether it failed or not."""
    for token in list(tokens.get("output_runtime_tokens", {}).values()):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def drop_failed_runtime_tokens(tokens: dict[str, Any]) -> None:
    """Waits for the thread's programs, and forgets those that failed: JAX's exit raises what they failed with."""
    runtime_tokens = tokens.get("output_runtime_tokens", {})
    for device, token in list(runtime_tokens.items()):
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError:
            del runtime_tokens[device]


def extend_effects_barrier(function: Callable[[], None]) -> None:
    """Has `jax.effects_barrier` call `function` when it has waited for JAX's own effects; JAX's exit does so, too.

    Both end in `RuntimeTokenSet.block_until_ready` (0.8 to 0.12), which programs reach by several names.
    """
    tokens = type(_dispatch.runtime_tokens)
    wait: Any = tokens.block_until_ready

    @functools.wraps(wait)
    def wait_for_both(self: Any) -> None:
        wait(self)
        function()

    tokens.block_until_ready = wait_for_both  # type: ignore[method-assign]


def extend_block_until_ready(function: Callable[[], None]) -> Callable[[], None]:
    """Has `jax.block_until_ready`, and the method of arrays, call `function` when what they wait for is ready.

    The first takes several arrays to `xla_client.batched_block_until_ready`, and one to its method (0.8 to 0.12).

    Returns:
        What undoes it, unless somebody else has replaced the same since: theirs calls ours, which goes on.

    Raises:
        LookupError: this JAX has one of the two no more; nothing has changed then.
    """
    places = [(ArrayImpl, "block_until_ready"), (_xla_client, "batched_block_until_ready")]
    for owner, name in places:
        if not callable(vars(owner).get(name)):
            raise LookupError(f"{owner.__name__} has no function {name}")

    def extended(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(wait, assigned=("__name__", "__doc__"))  # nanobind has no name for the rest
        def wait_for_both(arrays: Any) -> Any:
            result = wait(arrays)
            function()
            return result

        return wait_for_both

    replaced = [(owner, name, vars(owner)[name]) for owner, name in places]
    ours = [extended(wait) for _, _, wait in replaced]
    for (owner, name, _), wait_for_both in zip(replaced, ours, strict=True):
        setattr(owner, name, wait_for_both)

    def undo() -> None:
        for (owner, name, wait), wait_for_both in zip(replaced, ours, strict=True):
            if vars(owner).get(name) is wait_for_both:
                setattr(owner, name, wait)

    return undo


def drop_token(tokens: dict[str, Any], effect: Any) -> None:
    """Makes a thread's next computation with `effect` begin with a new token."""
    tokens.get("current_tokens", {}).pop(effect, None)


# `trace_context.trace is eval_trace` says that the calling thread is outside every JAX transformation and trace
# (0.8 to 0.12). `trace_context.is_top_level()` says the same in six times the time, which every call would pay.
trace_context: Any = _core.trace_ctx
eval_trace: Any = _core.eval_trace


def outside_traces() -> bool:
    """Whether the calling thread is outside every JAX transformation and trace."""
    return trace_context.trace is eval_trace


def eval_jaxpr(closed: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr."""
    return _core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


_SUBCOMP_TAKES_TRACEBACK = "outer_traceback" in inspect.signature(_mlir.jaxpr_subcomp).parameters  # from 0.9


class _Discharging(threading.local):
    depth = 0


_discharging = _Discharging()  # how many `lower_discharged` the thread is in


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
    _discharging.depth += 1
    try:
        outs, tokens = _mlir.jaxpr_subcomp(
            ctx.module_context, closed.jaxpr, ctx.name_stack, tokens, [_mlir.ir_constant(c) for c in closed.consts],
            *args, dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering, **extra,
        )  # fmt: skip
    finally:
        _discharging.depth -= 1
    if others:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens.subset(others)))
    return outs


def has_effect(closed: Any, effect_type: type[Any]) -> bool:
    """Whether a closed jaxpr, or an equation, has an effect of that type."""
    return any(isinstance(effect, effect_type) for effect in closed.effects)


def has_input_effect(closed: Any) -> bool:
    """Whether a closed jaxpr reads or writes references that it takes as arguments."""
    return any(isinstance(effect, _effects.JaxprInputEffect) for effect in closed.effects)


def constants_to_inputs(closed: Any) -> tuple[Any, list[Any]]:
    """The same program with its constants as leading inputs, and those constants."""
    jaxpr = _pe.convert_constvars_jaxpr(closed.jaxpr)
    return _pe.close_jaxpr(jaxpr), list(closed.consts)


PROGRAMS_IN_FLIGHT = 32
"""Programs that XLA:CPU lets a device have in flight (its `max_inflight_computations`); counted on 0.8 to 0.12."""


def execution_stream(ident: int) -> contextlib.AbstractContextManager[None]:
    """What is dispatched inside goes to the execution stream of the thread with this `threading.get_ident` (Linux).

    jaxlib's CPU client gives a thread the stream `std::hash<std::thread::id>` (`PosixEnv::GetCurrentThreadId` of tsl,
    0.8 to 0.12), which in libstdc++ is `_Hash_bytes` of the pthread's number. Where it is not, `streams` finds out.
    """
    stream = _xla_client.execution_stream_id(_hash_of_thread(ident))
    return cast("contextlib.AbstractContextManager[None]", stream)


@functools.lru_cache(maxsize=4096)
def _hash_of_thread(ident: int) -> int:
    # MurmurHash64A as in libstdc++'s hash_bytes.cc, of eight bytes.
    factor, mask = 0xC6A4A7935BD1E995, 2**64 - 1

    def mixed(value: int) -> int:
        return value ^ value >> 47

    value = (0xC70F6907 ^ (8 * factor & mask)) ^ (mixed(ident * factor & mask) * factor & mask)
    value = mixed(mixed(value * factor & mask) * factor & mask)
    return value - 2**64 if value >= 2**63 else value


def dispatches_asynchronously() -> bool:
    """Whether XLA:CPU comes back from a dispatch before the program is over."""
    config: Any = jax.config  # whose flags are no attributes
    return bool(config.read("jax_cpu_enable_async_dispatch"))


def traced_function(closed: Any) -> str | None:
    """Name and source line of the function that a program was traced from, as `source_of` says them."""
    name = getattr(closed.jaxpr.debug_info, "func_src_info", None)
    return None if name is None else str(name)


def source_of(function: Any) -> str:
    """Name and source line of a function, jitted or not, as JAX's traces note them (0.8 to 0.12)."""
    wrapped = inspect.unwrap(function)
    while isinstance(wrapped, functools.partial):  # which hides what it wraps from JAX until 0.12
        wrapped = inspect.unwrap(wrapped.func)
    return str(_api_util.fun_sourceinfo(wrapped))


def is_jaxs_own(function: Any) -> bool:
    """Whether JAX defines the function itself, in one of its private modules (0.8 to 0.12)."""
    return (getattr(function, "__module__", None) or "").startswith("jax._src.")


def in_callback_of_jax() -> bool:
    """Whether the calling thread is inside a host function that JAX calls for a program (0.8 to 0.12)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.callback":
            return True
        frame = frame.f_back
    return False


def call_after_each_jit(function: Callable[[Any], None]) -> Callable[[], None]:
    """Has JAX call `function(jitted)` after each call on its fast path, on any thread. Returns what undoes that.

    JAX has one such hook, which its NaN checks use (`_post_hook_state`, 0.8 to 0.12); the one there is called as well.
    """
    state: Any = _api._post_hook_state
    before = state.get_global()

    def hook(jitted: Any, args: Any, kwargs: Any, out: Any) -> None:
        if before is not None:
            before(jitted, args, kwargs, out)
        function(jitted)

    def undo() -> None:
        if state.get_global() is hook:
            state.set_global(before)

    hook.undo = undo  # type: ignore[attr-defined]
    state.set_global(hook)
    return undo


def is_hooked(undo: Callable[[], None]) -> bool:
    """Whether the hook that `undo` undoes is there: setting a NaN check replaces it."""
    hook: Any = _api._post_hook_state.get_global()
    return getattr(hook, "undo", None) is undo


def let_threads_have_the_hook() -> None:
    """Keeps JAX from hiding the hook of `call_after_each_jit` from threads; and from this one, if it has done so.

    JAX sets the hook of a thread to None whenever a NaN check may have ended there, as each jaxpr that it evaluates
    does, and then the thread has none (0.8 to 0.12).
    """
    for flag in (_config.debug_nans, _config.debug_infs):
        checked: Any = flag
        update = checked._update_thread_local_hook
        if not hasattr(update, "keeps_the_hook"):
            checked._update_thread_local_hook = _KeepingTheHook(update)
    _forget_that_there_is_no_hook()


class _KeepingTheHook:
    # What JAX calls when a thread's own setting of a NaN check changes.
    keeps_the_hook = True

    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def __call__(self, value: Any) -> None:
        self._update(value)
        _forget_that_there_is_no_hook()


def _forget_that_there_is_no_hook() -> None:
    state: Any = _api._post_hook_state
    everywhere = _config.debug_nans.get_global() or _config.debug_infs.get_global()
    if state.get_local() is None and not everywhere:
        state.set_local(_config.config_ext.unset)


FAST_DISPATCH_VARIABLE = "HOSTCALLBACK_FAST_DISPATCH"


def wrap_outermost_lowering(wrap: Callable[[Any], Any]) -> None:
    """Has JAX lower `wrap(closed)` where it lowers a program `closed` as a whole, whichever jit it is of.

    Every outermost jit ends in `pxla.lower_sharding_computation`, and there in `_cached_lowering_to_hlo`, which gets
    the program after dead code, references and donation have been dealt with (0.8 to 0.12). Programs that are exported
    stay as they are: their effects tell the process that runs them that they hold taps.

    Raises:
        LookupError: this JAX lowers its programs in another way. Nothing has been changed then.
    """
    lower = getattr(_pxla, "_cached_lowering_to_hlo", None)
    outer = inspect.unwrap(getattr(_pxla, "lower_sharding_computation", len))
    calls = getattr(getattr(outer, "__code__", None), "co_names", ())
    if lower is None or "_cached_lowering_to_hlo" not in calls:
        raise LookupError("jax._src.interpreters.pxla does not lower through _cached_lowering_to_hlo")
    # The cached function is C++ and does not tell its own signature.
    parameters = list(inspect.signature(outer).parameters)
    if parameters[:1] != ["closed_jaxpr"] or "lowering_parameters" not in parameters:
        raise LookupError(f"pxla.lower_sharding_computation takes ({', '.join(parameters)})")

    @functools.wraps(lower)
    def lower_wrapped(closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        how = kwargs.get("lowering_parameters")
        if how is not None and not how.for_export:
            closed_jaxpr = wrap(closed_jaxpr)
        return lower(closed_jaxpr, *args, **kwargs)

    module: Any = _pxla
    module._cached_lowering_to_hlo = lower_wrapped


def as_one_equation(closed: Any, primitive: Any, effects: set[Any]) -> Any:
    """A program that is one equation of `primitive`, with `closed` among its parameters, and has these effects."""
    inner, _ = constants_to_inputs(closed)
    operands = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    results = [_core.Var(aval) for aval in inner.out_avals]
    equation = _core.new_jaxpr_eqn(
        operands, results, primitive, {"closed": inner}, effects, _source_info_util.new_source_info()
    )
    outer = closed.jaxpr.replace(
        eqns=[equation], outvars=results, effects=effects, debug_info=closed.jaxpr.debug_info
    )
    return closed.replace(jaxpr=outer)


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


def lowering_platform(platform: str) -> str:
    """What JAX calls a device's platform when it lowers for it: `cuda` or `rocm` where the device says `gpu`."""
    if platform != "gpu":
        return platform
    # Devices go on saying `gpu` for what programs tell apart (0.8 to 0.12).
    return str(getattr(_xla_bridge.get_backend(platform), "_raw_platform", platform))


_SET_SHARDING_TAKES_CONTEXT = len(inspect.signature(_mlir.set_sharding).parameters) == 3  # from 0.10


class LoweringContext:
    """What a tap's lowering rule needs of JAX's lowering context, under one name in all versions."""

    def __init__(self, ctx: Any) -> None:
        """Wraps the context that JAX passes to a lowering rule."""
        self.raw = ctx
        self.axis_context = ctx.module_context.axis_context

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

    def constant(self, value: np.ndarray[Any, Any]) -> Any:
        """An array that the program brings along."""
        return _mlir.ir_constant(value)

    @property
    def manual(self) -> bool:
        """Whether the equation is inside shard_map or pmap, so that each device runs its own."""
        return isinstance(self.axis_context, _sharding_impls.SPMDAxisContext)

    @property
    def partially_manual(self) -> bool:
        """Whether some axes of the mesh are still partitioned by the compiler."""
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
    def device_count(self) -> int:
        """Over how many devices the program is partitioned, by the compiler or by hand; 1 for none."""
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

    def local_devices(self) -> list[Any]:
        """This process's devices among the program's, or all of the platform's where JAX does not know them."""
        devices = self.devices()
        if devices is None:
            return list(jax.local_devices(backend=self.platform)) if self._backend_is_here() else []
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

        From 0.9 to 0.10, jaxlib reads through a null pointer (`SaveLayoutToEmptyProto`) when it serializes a program
        for several devices that takes tokens, as one with an ordered effect does. JAX does not cache programs with
        host callbacks; this one is never called.
        """
        if (0, 8, 1) <= jax.__version_info__ < (0, 11) and self.device_count > 1 and not _discharging.depth:
            self.raw.module_context.add_host_callback(lambda *args: ())

    def token_in(self, effect: Any) -> Any:
        """The token that the equation must wait for: the one JAX threads for the effect, or else the block's own."""
        if effect in self.raw.tokens_in.effects():
            return self.raw.tokens_in.get(effect)
        # The last token that a call in this block of code made.
        for op in reversed(list(_ir.InsertionPoint.current.block.operations)):
            if op.operation.name == "stablehlo.custom_call":
                for result in op.results:
                    if str(result.type) == "!stablehlo.token":
                        return result
        return _hlo.create_token()

    def set_token_out(self, effect: Any, token: Any) -> None:
        """The token that later equations wait for."""
        if effect in self.raw.tokens_in.effects():
            self.raw.set_tokens_out(self.raw.tokens_in.update_tokens(_mlir.TokenSet({effect: token})))

    def unless(self, predicate: Any, token: Any, emit: Callable[[], Any]) -> Any:
        """Emits a branch that does what `emit` does, unless all of a boolean array holds; returns the new token."""
        branch = _hlo.IfOp([_hlo.TokenType.get()], _all(predicate))
        with _ir.InsertionPoint(branch.regions[0].blocks.append()):
            _hlo.return_([token])
        with _ir.InsertionPoint(branch.regions[1].blocks.append()):
            _hlo.return_([emit()])
        return branch.results[0]

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

    def partitioned_call(self, name: str, token: Any, operands: Sequence[Any], config: str) -> Any:
        """Emits a side-effecting call that a partitioner registered as `name` replaces; returns its token."""
        op = _hlo.CustomCallOp(
            [_hlo.TokenType.get()],
            [token, *operands],
            call_target_name=_ir.StringAttr.get(name),
            has_side_effect=_ir.BoolAttr.get(True),
            api_version=_mlir.i32_attr(2),
            called_computations=_ir.ArrayAttr.get([]),
            backend_config=_ir.StringAttr.get(config),
            operand_layouts=None,
            result_layouts=None,
        )
        return op.results[0]

    def add_python_callback(self, function: Callable[..., Any]) -> tuple[str, int]:
        """Attaches `function(*operands)` to the program, for a call on a token that is made elsewhere.

        Returns:
            The call's target and the callback's number, its attribute `index` (0.8 to 0.12).
        """

        def on_token(token: Any, *operands: Any) -> tuple[Any, ...]:
            function(*operands)
            return (token,)

        module = self.raw.module_context
        module.add_host_callback(on_token)
        device = "cpu" if self.platform == "cpu" else "gpu"
        return f"xla_ffi_python_{device}_callback", len(module.host_callbacks) - 1

    def widen(self, operands: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
        """Operands whose elements are whole bytes, as `widened` says."""
        # JAX 0.8.0 hands packed elements of less than a byte to Python as they lie.
        return [_widen(operand, aval) for operand, aval in zip(operands, avals, strict=True)]

    def sharding_of_one_device(self, avals: Sequence[Any]) -> Any:
        """The sharding of a Python callback with such results that the program's first device calls (0.8 to 0.12).

        XLA's partitioner takes no other custom call on one device.

        Raises:
            NotImplementedError: some axes of the mesh are manual.
        """
        return _callback._callback_op_sharding(self.axis_context, None, avals)

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

        `partition` is the index of the running device in the program's device list. Where the compiler partitions, only
        the first device calls, with whole arrays.
        """
        index_aval = _core.ShapedArray((), np.dtype(np.uint32))
        operands = self.widen(operands, avals)
        avals = [_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in avals]
        ctx = dataclasses.replace(
            self.raw, module_context=self._module(), avals_in=[index_aval, *avals], avals_out=[]
        )
        sharding = _sharding_of_per_device_calls([]) if self.manual else None
        if self.automatic:
            sharding = self.sharding_of_one_device([])
        _, token, _ = _callback.emit_python_callback(
            ctx, function, token, [self._partition(), *operands], [index_aval, *avals], [],
            has_side_effect=True, sharding=sharding,
        )  # fmt: skip
        return token

    def _module(self) -> Any:
        module = self.raw.module_context
        if self._backend_is_here():
            return module
        return module.replace(backend=_BackendElsewhere(self.platform), platforms=(self.platform,))

    def _backend_is_here(self) -> bool:
        try:
            self.raw.module_context.get_backend()
        except (RuntimeError, ValueError):  # not on this machine; another one than the program was traced for
            return False
        return True

    def _partition(self) -> Any:
        if isinstance(self.axis_context, _ReplicaAxisContext):
            return _hlo.ReplicaIdOp().result
        if self.manual:
            return _hlo.PartitionIdOp().result
        return _mlir.ir_constant(np.uint32(0))


def _all(predicate: Any) -> Any:
    rank = len(_ir.RankedTensorType(predicate.type).shape)
    if not rank:
        return predicate
    scalar = _ir.RankedTensorType.get([], _ir.IntegerType.get_signless(1))
    dimensions = _ir.DenseI64ArrayAttr.get(range(rank))
    reduce = _hlo.ReduceOp([scalar], [predicate], [_mlir.ir_constant(np.bool_(True))], dimensions)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with _ir.InsertionPoint(block):
        _hlo.return_([_hlo.AndOp(*block.arguments).result])
    return reduce.results[0]


class _BackendElsewhere:
    # Stands for the backend of a platform that a program is lowered for on a machine without it (0.8 to 0.12 ask it for
    # nothing else). The program cannot run here: what the backend would remember of the callback is not needed.

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def make_python_callback_from_host_send_and_recv(self, *args: Any) -> None:
        return None


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
    """Registers a lowering rule that JAX may not cache: it depends on the place it is called in."""
    _mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def uint8_attribute(data: bytes) -> Any:
    """Bytes as an FFI attribute."""
    return np.frombuffer(data, np.uint8)


# ---- Partitioning by the compiler --------------------------------------------------------------------------------
# jax.experimental.custom_partitioning is built on the same hooks (0.8 to 0.12), but its call takes no token, has no
# side effect, and names its Python callback by an address, which makes programs differ between processes.

REPLICATED: Any = _xla_client.HloSharding.replicate()


def sharding_without(sharding: Any, rank: int, axes: Sequence[int]) -> Any:
    """The sharding of an array of that rank that leaves some of its axes whole, and the others as they are."""
    if not axes or not sharding.is_tiled():
        return sharding
    sizes = sharding.tile_assignment_dimensions()
    if all(sizes[axis] == 1 for axis in axes):
        return sharding
    kinds: Any = _xla_client.OpSharding.Type
    # What devices are tiled over: the array's axes, and then those of devices that hold the same shard, or are of
    # different groups where some axes of the mesh are manual.
    groups = [*sharding.subgroup_types()] or [kinds.REPLICATED] * (len(sizes) - rank)
    devices = np.reshape(sharding.tile_assignment_devices(), sizes)
    same = [*axes, *(rank + i for i, kind in enumerate(groups) if kind == kinds.REPLICATED)]
    rest = [axis for axis in range(devices.ndim) if axis not in same]
    devices = devices.transpose([*rest, *same])
    left = [1 if axis in axes else sizes[axis] for axis in range(rank)]
    other = [kind for kind in groups if kind != kinds.REPLICATED]
    found = _xla_client.OpSharding()
    found.type = kinds.OTHER
    found.tile_assignment_dimensions = [
        *left, *(sizes[axis] for axis in rest if axis >= rank), int(np.prod([sizes[axis] for axis in same]))
    ]  # fmt: skip
    found.tile_assignment_devices = devices.ravel().tolist()
    if other:
        found.last_tile_dims = [*other, kinds.REPLICATED]
    else:
        found.replicate_on_last_tile_dim = True
    return _xla_client.HloSharding.from_proto(found)


def register_partitioner(name: str, partition: Callable[..., Any]) -> None:
    """Lets `partition` say what each device runs of the side-effecting custom calls of that name.

    It is called as `partition(arg_shapes, arg_shardings, result_shape, result_sharding, config)` while XLA compiles and
    returns a module, the operands' shardings and the result's.
    """
    arguments: dict[str, Any] = {
        "name": name,
        "prop_user_sharding": lambda sharding, shape, config: sharding,
        "partition": partition,
        "infer_sharding_from_operands": lambda shapes, shardings, shape, config: REPLICATED,
        "can_side_effecting_have_replicated_sharding": True,
    }
    _xla_client.register_custom_call_partitioner(**arguments)
    # Platforms in plugins have partitioners of their own.
    _xla_bridge.register_plugin_callbacks(
        functools.partial(_xla_client.register_custom_call_partitioner, **arguments)
    )


def tap_of_a_partition(
    target: str,
    attributes: dict[str, Any],
    table: np.ndarray[Any, Any],
    operands: Sequence[tuple[tuple[int, ...], Any]],
    *,
    with_partition: bool,
) -> bytes:
    """A module that calls `target` on a token, this device's row of `table` and the operands; returns the token.

    Args:
        target: of a typed-FFI call.
        attributes: of the call.
        table: int64, shape [partitions, numbers].
        operands: shape and dtype of each on one device.
        with_partition: whether the number of the device comes before the row.
    """
    context = _mlir.make_ir_context()
    with context, _ir.Location.unknown(context):
        module = _ir.Module.create()
        types = [
            _ir.RankedTensorType.get(shape, _mlir.dtype_to_ir_type(np.dtype(dtype)))
            for shape, dtype in operands
        ]
        token = _hlo.TokenType.get()
        with _ir.InsertionPoint(module.body):
            main: Any = _func.FuncOp("main", ([token, *types], [token]))
            main.attributes["sym_visibility"] = _ir.StringAttr.get("public")
            with _ir.InsertionPoint(main.add_entry_block()):
                token_in, *arrays = main.arguments
                partition = _hlo.PartitionIdOp().result
                values = [_row(table, partition), *arrays]
                if with_partition:
                    values.insert(0, partition)
                ranks = [len(_ir.RankedTensorType(value.type).shape) for value in values]
                call = _mlir.custom_call(
                    target,
                    result_types=[token],
                    operands=[token_in, *values],
                    has_side_effect=True,
                    api_version=4,
                    backend_config={key: _mlir.ir_attribute(value) for key, value in attributes.items()},
                    operand_layouts=[(), *(tuple(range(rank - 1, -1, -1)) for rank in ranks)],
                    result_layouts=[()],
                )
                _func.ReturnOp(call.results)
        return _mlir.module_to_bytecode(module)


def _row(table: np.ndarray[Any, Any], index: Any) -> Any:
    int64, int32 = _ir.IntegerType.get_signless(64), _ir.IntegerType.get_signless(32)
    elements: Any = _ir.DenseElementsAttr  # whose annotations know no types of elements
    rows = _hlo.constant(elements.get(table, type=int64, shape=table.shape))
    start = _hlo.convert(_ir.RankedTensorType.get((), int32), index)
    zero = _hlo.constant(elements.get(np.zeros((), np.int32), type=int32, shape=()))
    sizes = _ir.DenseI64ArrayAttr.get((1, table.shape[1]))
    row = _hlo.dynamic_slice(rows, [start, zero], sizes)
    return _hlo.reshape(_ir.RankedTensorType.get((table.shape[1],), int64), row)


# hostcallback.legacy_flags: flags of a module that JAX removed, which programs set with `jax.config.update`. It knows
# only flags that were defined, and has no public way of defining one (0.8 to 0.12).


def define_flag(name: str, default: bool | int, about: str, on_set: Callable[[Any], None]) -> Any:
    """Defines a JAX configuration flag; its `.value` is its current value.

    Args:
        name: in lower case. The environment variable of that name in upper case sets it, too.
        default: its value until it is set; its type is the flag's.
        about: what it is for.
        on_set: called with each value that it gets, the first one included.
    """
    define: Any = _config.bool_flag if isinstance(default, bool) else _config.int_flag
    read: Any = _config.bool_env if isinstance(default, bool) else _config.int_env
    return define(name, read(name.upper(), default), help=about, update_hook=on_set)


def shared_value(key: str, value: str, timeout_sec: float) -> str | None:
    """What the first process of the program to call this gave for `key`; None in a program of one process.

    Raises:
        jax.errors.JaxRuntimeError: the coordinator of `jax.distributed` cannot be reached.
    """
    client: Any = _distributed.global_state.client
    if client is None:
        return None
    with contextlib.suppress(
        jax.errors.JaxRuntimeError
    ):  # another one was first; or the next call says what is wrong
        client.key_value_set(key, value)
    found: str = client.blocking_key_value_get(key, int(timeout_sec * 1000))
    return found


# ---- What may be tapped: references, and tracers whose trace is over -------------------------------------------------


def escaped_tracer_error(value: Any) -> Exception | None:
    """JAX's error for a tracer whose trace is over; None for every other value.

    JAX (0.8 to 0.12) takes most such tracers for constants of whatever is traced now, and raises only when that runs,
    far from the line that used them. A tracer is alive if its trace is current or encloses the current one; where a
    kind of trace does not tell what encloses it, JAX is left to judge.
    """
    if not isinstance(value, _core.Tracer):
        return None
    trace: Any = _core.trace_ctx.trace
    while not _are_one(trace, value._trace):
        if trace is eval_trace:
            error: Exception = _core.escaped_tracer_error(value)
            return error
        trace = getattr(trace, "parent_trace", None)
        if trace is None:
            return None
    return None


def trace_of(tracer: Any) -> Literal["this", "outer"] | None:
    """Where a tracer's trace is, seen from the current one; None if it is over, or inside, or of another kind.

    "this" also means transformations (vmap, jvp) around which nothing was traced to a jaxpr since: only tracers of
    those may go into the current jaxpr without it depending on what encloses it, from where JAX's caches of jaxprs
    (of inner jits and loop bodies, 0.8 to 0.12) take it elsewhere.
    """
    found: Literal["this", "outer"] = "this"
    trace: Any = _core.trace_ctx.trace
    while trace is not None and trace is not eval_trace:
        if _are_one(trace, tracer._trace):
            return found
        if isinstance(trace, _pe.DynamicJaxprTrace):
            found = "outer"
        trace = getattr(trace, "parent_trace", None)
    return None


def is_frame_of_jit(frame: FrameType) -> bool:
    """Whether a frame is of `jax.jit`'s own code: the jaxpr of a function that it calls outlives the outer trace."""
    return frame.f_globals.get("__name__") == "jax._src.pjit"  # from 0.4 to 0.12


def _are_one(trace: Any, other: Any) -> bool:
    # JAX makes several objects for one trace; they share a tag.
    return trace is other or getattr(trace, "tag", trace) is getattr(other, "tag", other)


# ---- hostcallback.loops: JAX's rules for loops and checkpoints -------------------------------------------------------

Var: Any = _core.Var
remat_p: Any = _ad_checkpoint.remat_p  # jax.extend.core.primitives has it since 0.10
batch_jaxpr: Any = _batching.batch_jaxpr2


def wrap_scan_hoisting(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the function that takes loop-invariant code out of scans under differentiation.

    It is called as `hoist(closed_jaxpr, known_consts, *counts)` and returns what stays first, a closed jaxpr (0.8 to
    0.12). It is in no table of rules: two of JAX's rules call it by name.
    """
    _loops._scan_known_hoisting = wrapper(_loops._scan_known_hoisting)


def lower_to_primitives(closed: Any) -> Any:
    """The same program without "high-level" equations, which have no lowering rules.

    They came with 0.8; `jax.lax.custom_root` is one since 0.12. What takes or returns high-level values stays as it is.
    """
    if not closed.jaxpr.is_high or any(aval.is_high for aval in (*closed.in_avals, *closed.out_avals)):
        return closed
    lower: Any = getattr(_pe, "lower_jaxpr2", _pe.lower_jaxpr)  # 0.8 has the second only
    return lower(closed)


# ---- Calls with results --------------------------------------------------------------------------------------------


def results_that_vary_as(avals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The avals of results that depend on all operands: they vary over every manual mesh axis that one of those does.

    The axes are `vma` in 0.8 and `manual_axis_type.varying` from 0.10 on. JAX's own rule for its callbacks and FFI
    calls leaves them out or demands that all operands agree.
    """
    varying: frozenset[Any] = frozenset()
    for aval in avals:
        varying |= aval.mat.varying if _HAS_MANUAL_AXIS_TYPE else aval.vma
    sharding = _core.get_cur_mesh_sharding()
    if not varying:
        return [result.update(sharding=sharding) for result in results]
    if _HAS_MANUAL_AXIS_TYPE:
        axes: dict[str, Any] = {"manual_axis_type": _core.ManualAxisType(varying=varying)}
    else:
        axes = {"vma": varying}
    return [result.update(sharding=sharding, **axes) for result in results]


_HAS_MANUAL_AXIS_TYPE = hasattr(_core, "ManualAxisType")


def zero_tangent(primal: Any) -> Any:
    """A symbolic zero for the tangent of a value."""
    zero: Any = _ad.Zero  # whose annotations know no class methods
    return zero.from_primal_value(primal)


_convert: Any = _hlo.convert


def batch_call(primitive: Any, args: Any, dims: Any, **params: Any) -> Any:
    """Batches an opaque call as `vmap_method` says, as JAX does it for `pure_callback` and `ffi_call` (0.8 to 0.12)."""
    return _ffi.ffi_batching_rule(primitive, args, dims, **params)


def custom_call_with_results(
    context: LoweringContext,
    name: str,
    token: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    attributes: dict[str, Any],
) -> tuple[Any, list[Any]]:
    """As `LoweringContext.custom_call`, with row-major results of the avals `results`; returns token and results."""
    ranks = [len(_ir.RankedTensorType(operand.type).shape) for operand in operands]
    op = _mlir.custom_call(
        name,
        result_types=[_hlo.TokenType.get(), *(_ir_type(context, aval) for aval in results)],
        operands=[token, *operands],
        has_side_effect=True,
        api_version=4,
        backend_config={key: _mlir.ir_attribute(value) for key, value in attributes.items()},
        operand_layouts=[(), *(tuple(range(rank - 1, -1, -1)) for rank in ranks)],
        result_layouts=[(), *(tuple(range(aval.ndim - 1, -1, -1)) for aval in results)],
    )
    if context.manual:
        sharding = _sharding_of_per_device_calls([_core.ShapedArray((), np.dtype(np.bool_)), *results])
        set_sharding: Any = _mlir.set_sharding
        if _SET_SHARDING_TAKES_CONTEXT:
            set_sharding(context.raw.module_context, op, sharding)
        else:
            set_sharding(op, sharding)
    token_out, *outs = op.results
    return token_out, outs


def python_callback_with_results(
    context: LoweringContext,
    function: Callable[..., Any],
    token: Any,
    operands: Sequence[Any],
    avals: Sequence[Any],
    results: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """As `LoweringContext.python_callback`; the function returns arrays of the avals `results`, widened.

    Without a token it is in no order, and returns none.
    """
    index_aval = _core.ShapedArray((), np.dtype(np.uint32))
    operands = [_widen(operand, aval) for operand, aval in zip(operands, avals, strict=True)]
    avals_in = [index_aval, *(_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in avals)]
    avals_out = [_core.ShapedArray(aval.shape, widened(aval.dtype)) for aval in results]
    ctx = dataclasses.replace(
        context.raw, module_context=context._module(), avals_in=avals_in, avals_out=avals_out
    )
    sharding = _sharding_of_per_device_calls(avals_out) if context.manual else None
    if context.automatic:
        sharding = context.sharding_of_one_device(avals_out)
    extra = {"returns_token": token is not None} if _CALLBACK_RETURNS_TOKEN else {}
    outs, token_out, _ = _callback.emit_python_callback(
        ctx, function, token, [context._partition(), *operands], avals_in, avals_out,
        has_side_effect=True, sharding=sharding, **extra,
    )  # fmt: skip
    narrowed = [
        out if widened(aval.dtype) == aval.dtype else _convert(_ir_type(context, aval), out)
        for out, aval in zip(outs, results, strict=True)
    ]
    return token_out, narrowed


_AVAL_TO_IR_TYPE_TAKES_CONTEXT = len(inspect.signature(_mlir.aval_to_ir_type).parameters) > 1


def _ir_type(context: LoweringContext, aval: Any) -> Any:
    to_type: Any = _mlir.aval_to_ir_type
    return to_type(context.raw.module_context, aval) if _AVAL_TO_IR_TYPE_TAKES_CONTEXT else to_type(aval)


def call_when_run(primitive: Any, function: Callable[[], None]) -> None:
    """Makes a primitive without operands call `function` where its program runs; it returns an empty array."""
    aval = _core.ShapedArray((0,), np.dtype(np.uint8))
    extra: dict[str, Any] = {"returns_token": False} if _CALLBACK_RETURNS_TOKEN else {}

    def call() -> tuple[Any, ...]:
        function()
        return (np.zeros(0, np.uint8),)

    def lower(ctx: Any) -> Any:
        return _callback.emit_python_callback(ctx, call, None, [], [], [aval], has_side_effect=True, **extra)[
            0
        ]

    primitive.def_abstract_eval(lambda: [aval])
    _mlir.register_lowering(primitive, lower)


# From 0.9 on; before, there is a token if one is passed.
_CALLBACK_RETURNS_TOKEN = "returns_token" in inspect.signature(_callback.emit_python_callback).parameters


def dispatch_synchronously(context: LoweringContext) -> None:
    """Has the calling thread run the program on CPU, and wait for its end, where its arguments are there.

    XLA provides for it where programs have host callbacks, "to avoid deadlocks with reentrant callbacks" (0.8 to
    0.12): a thread holds no more than one of the 32 programs that a device has in flight, and those of a host
    function find their places. This callback is never called.
    """
    context.raw.module_context.add_host_callback(lambda *args: ())


# ---- hostcallback.rewrite: programs evaluated equation by equation ---------------------------------------------------

shard_map_p: Any = _shard_map.shard_map_p
INLINE_CALLS = ("core_call", "closed_call", "core_closed_call", "call")
"""Primitives that only call a program."""


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and the values of its constants. From 0.12 on there is one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def bind_equation(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation on other values; the rules of custom derivatives stay with it."""
    bind_params: Any = equation.primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(bind_params, tuple):  # until 0.9; then the functions are among the parameters
        functions, bind_params = bind_params
    outs = equation.primitive.bind(*functions, *values, **bind_params)
    return list(outs) if equation.primitive.multiple_results else [outs]


@contextlib.contextmanager
def equation_context(equation: Any) -> Iterator[None]:
    """What an equation was traced in (name stack, source line, `compute_on` and such), as `core.eval_jaxpr` has it."""
    name_stack: Any = _source_info_util.current_name_stack() + equation.source_info.name_stack
    with (
        _source_info_util.user_context(equation.source_info.traceback, name_stack=name_stack),
        equation.ctx.manager,
    ):
        yield


def no_equation_context() -> Any:
    """Undoes `equation_context` while other code of the user's is traced, whose equations have their own lines."""
    return _source_info_util.user_context(None, name_stack=_source_info_util.new_name_stack())


def equation_frames(equation: Any) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames that an equation was traced in, innermost first, without JAX's own.

    Only those of the innermost function that JAX traced, and none if that is JAX's own: what called it may have been
    another line when JAX traced it, and kept the result, than it is here. From 0.9 on there are no others.
    """
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.function_name.endswith("trace_to_jaxpr_dynamic"):
            return
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name


def scan_groups(params: dict[str, Any], operands: Sequence[Any]) -> list[list[Any]]:
    """A scan's operands as constants, carry and what is scanned over."""
    if "ft_in" in params:  # from 0.12 on
        return [list(group) for group in params["ft_in"].update(list(operands)).unpack()]
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    return [list(operands[:first]), list(operands[first:second]), list(operands[second:])]


def is_staging() -> bool:
    """Whether what the calling thread computes now, under whatever transformation, becomes part of a program."""
    trace: Any = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def jit_options(params: dict[str, Any]) -> dict[str, Any]:
    """What `jax.jit` takes of a nested jit's parameters, beside its shardings; `inline` has been a bool and an enum."""
    return {key: params[key] for key in ("keep_unused", "inline") if key in params}


def jit_shardings(params: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """`in_shardings` or `out_shardings` of a nested jit, for `jax.jit`; None where nothing is specified."""
    shardings = [None if isinstance(s, _sharding_impls.UnspecifiedValue) else s for s in params[name]]
    return None if all(s is None for s in shardings) else tuple(shardings)


def shard_map_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that a shard_map takes over, in the order of its mesh; the parameter is `manual_axes` until 0.9."""
    manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return tuple(axis for axis in params["mesh"].axis_names if axis in manual)


def varying_axes(avals: Iterable[Any]) -> frozenset[Any]:
    """The manual mesh axes over which any of the avals varies; see `results_that_vary_as`."""
    axes: frozenset[Any] = frozenset()
    arrays: list[Any] = [aval for aval in avals if isinstance(aval, _core.ShapedArray)]
    for aval in arrays:
        axes |= aval.mat.varying if _HAS_MANUAL_AXIS_TYPE else aval.vma
    return axes


def vary_over(axes: frozenset[Any], value: Any) -> Any:
    """The value as one that varies over those axes as well: the two results of a branch, say, must agree in that."""
    missing = tuple(sorted(axes - varying_axes([jax.typeof(value)]), key=str))
    if not missing:
        return value
    lax: Any = jax.lax  # which has pcast from 0.9 on, where pvary is deprecated
    return lax.pcast(value, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(value, missing)


# ---- hostcallback.kernels, custom_partitions, experimental_rules: where JAX expects no effects -----------------------

KERNEL_PRIMITIVES = [
    ("jax._src.pallas.pallas_call", "pallas_call_p"),  # 0.8 to 0.12
    ("jax._src.pallas.core", "core_map_p"),  # until 0.11
    ("jax._src.pallas.mpmd", "mpmd_map_p"),  # from 0.10 on; before, core_map_p becomes pallas_call_p
]
"""Modules, imported with Pallas, and their primitives that run kernels."""


def kernel_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The kernels of an equation of such a primitive, and the index maps of their blocks (0.8 to 0.12)."""
    blocks = getattr(params.get("grid_mapping"), "block_mappings", ())
    kernels = params["jaxprs"] if "jaxprs" in params else (params["jaxpr"],)
    return [*kernels, *(open_jaxpr(block.index_map_jaxpr)[0] for block in blocks)]


def add_effects(primitive: Any, effects_of: Callable[[dict[str, Any]], set[Any]]) -> None:
    """Gives the equations of one of JAX's primitives more effects: those that `effects_of` finds for its parameters."""
    evaluate = primitive.abstract_eval  # which returns effects as well, however it was registered

    @functools.wraps(evaluate)
    def evaluate_with_effects(*avals: Any, **params: Any) -> Any:
        avals_out, effects = evaluate(*avals, **params)
        more = effects_of(params)
        return avals_out, {*effects, *more} if more else effects

    primitive.def_effectful_abstract_eval(evaluate_with_effects)


def equations_of(jaxprs: Iterable[Any], primitives: Sequence[Any]) -> Iterator[Any]:
    """Every equation of one of the primitives in the jaxprs, and in those within them."""
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            if equation.primitive in primitives:
                yield equation
        yield from equations_of(_core.subjaxprs(jaxpr), primitives)


custom_partitioning_p: Any = _custom_partitioning.custom_partitioning_p


def wrap_custom_partitioning(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the lowering rule of functions with `jax.experimental.custom_partitioning`.

    Where the compiler partitions, JAX's rule (0.8 to 0.12) makes a call without side effects and sets no tokens. Later,
    while XLA compiles, it lowers what the function's `partition` returns, for a program without tokens, and keeps
    nothing alive of that.
    """
    _mlir.register_lowering(
        custom_partitioning_p, wrapper(_custom_partitioning._custom_partitioning_lowering_rule)
    )


def tokens_are_set(ctx: Any) -> bool:
    """Whether a lowering rule has set the tokens of its equation's ordered effects."""
    return ctx.tokens_out is not None


def pass_tokens(ctx: Any) -> None:
    """Hands an equation's tokens on as they are."""
    ctx.set_tokens_out(ctx.tokens_in)


def mark_side_effect(results: Sequence[Any]) -> None:
    """Keeps XLA from dropping the custom call that has these results, if it is one with any."""
    for result in results[:1]:
        result.owner.attributes["has_side_effect"] = _ir.BoolAttr.get(True)


def keeping_alive_in(ctx: Any, kept: list[Any]) -> Any:
    """The lowering context, with `kept` in the place of what JAX keeps alive as long as the program."""
    return ctx.replace(module_context=ctx.module_context.replace(keepalives=kept))


# ---- hostcallback.accelerate: JAX's own callbacks, taken over where they are bound -----------------------------------

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


def callback_primitive(name: str) -> Any:
    """The primitive in which every call of that public function ends, wherever a library got the function from.

    Raises:
        LookupError: this JAX has none of that name.
    """
    module, attribute, _, _ = _CALLBACKS[name]
    primitive = getattr(module, attribute, None)
    if not callable(getattr(primitive, "bind", None)):
        raise LookupError(f"{module.__name__} has no primitive {attribute}")
    return primitive


def check_callback_params(name: str, params: dict[str, Any]) -> None:
    """Raises LookupError where an equation of that primitive has parameters that this code does not know."""
    _, attribute, always, sometimes = _CALLBACKS[name]
    if not always <= set(params) <= always | sometimes:
        known = ", ".join(sorted(always | sometimes))
        raise LookupError(f"{attribute} has the parameters {', '.join(sorted(params))}, expected {known}")


def replace_bind(primitive: Any, bind: Callable[..., Any]) -> None:
    """Has `primitive.bind(...)` call `bind`: tracing ends there, and so does evaluating a jaxpr (0.8 to 0.12)."""
    primitive.bind = bind  # hides the method of the class


def restore_bind(primitive: Any, bind: Callable[..., Any]) -> None:
    """Undoes `replace_bind`, unless somebody else has replaced it since: theirs calls ours, which hands on."""
    if vars(primitive).get("bind") is bind:
        del primitive.bind


def own_bind(primitive: Any) -> Callable[..., Any]:
    """What `primitive.bind` is now."""
    bind: Callable[..., Any] = primitive.bind
    return bind


def is_ordered_debug_effect(effect: Any) -> bool:
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
    cells = {name: cell.cell_contents for name, cell in zip(names, flat.__closure__, strict=True)}
    return cells["callback"], cells["in_tree"], dict(cells["static_args"])


def debug_logger() -> Any:
    """The logger of `jax.debug.log`."""
    return _debugging.logger


def is_batching() -> bool:
    """Whether the calling thread is in a vmap, under whatever transformation."""
    trace: Any = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _batching.BatchTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def evaluated_frames() -> Iterator[tuple[str, int, str]]:
    """As `equation_frames`, of the equation that the calling thread evaluates; none where it calls a user's function.

    `eval_jaxpr` and JAX's rules put the equation's traceback where new equations get theirs from (0.8 to 0.12).
    """
    traceback = getattr(_source_info_util._source_info_context.context, "traceback", None)
    for frame in traceback.frames if traceback else ():
        if _source_info_util.is_user_filename(frame.file_name):
            yield frame.file_name, frame.line_num, frame.function_name


def tracing_for(frame: FrameType | None) -> str | None:
    """For what code a frame's thread is tracing that JAX lowers by rules of its own; None for ordinary programs.

    What such code binds gets into no program's list of effects: a Pallas kernel, the body of a custom partitioning, and
    what a lowering rule is written in (`mlir.lower_fun`). JAX tells nowhere that it traces for one, so this looks for
    the modules and the function that do it (0.8 to 0.12).
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax._src."):
            if module == "jax._src.interpreters.mlir" and frame.f_code.co_name == "f_lowered":
                return "a lowering rule"
            if module.startswith("jax._src.pallas."):
                return "a Pallas kernel"
            if module == "jax._src.custom_partitioning":
                return "the body of a custom partitioning"
        frame = frame.f_back
    return None
