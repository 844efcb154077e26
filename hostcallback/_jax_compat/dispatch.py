"""The seams of JAX's dispatch: effects, the hook after each jitted call, whole programs.

Whole programs are those that JAX lowers, exports, and reads from where they were exported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax._src import (
    api as _api,  # _post_hook_state: what is called after each jitted call
    callback as _callback,  # _OrderedIOEffect
    config as _config,  # debug_nans, debug_infs: share a hook with us; eager_constant_folding
    core as _core,  # Var, new_jaxpr_eqn
    dispatch as _dispatch,  # jaxpr_has_prim_requiring_devices, get_intermediate_shardings
    effects as _effects,  # effect types can be registered nowhere else
    mesh as _mesh,  # get_concrete_mesh, thread_resources
    source_info_util as _source_info_util,  # new_source_info
)
from jax._src.export import _export  # what calls an exported program, its lowering rule; _check_module
from jax._src.interpreters import (
    mlir as _mlir,  # register_lowering with the rule that JAX registers
    pxla as _pxla,  # lower_sharding_computation, _cached_lowering_to_hlo, ExecuteReplicated
)
from jax._src.lib.mlir import ir as _ir  # StringAttr

from hostcallback._jax_compat.types import (
    AnyJaxpr,
    Aval,
    ClosedJaxpr,
    Effect,
    JaxprEqn,
    LoweringRuleContext,
    Primitive,
)


def call_after_each_jit(function: Callable[[Any], None]) -> Callable[[], None]:
    """Has JAX call `function(jitted)` after each call on its fast path, on any thread. Returns what undoes that.

    JAX has one such hook, which its NaN checks use (`_post_hook_state`, 0.8 to 0.12); the one there is called as well.
    Without it, a call on the fast path runs no Python code in which a failed check could be raised.
    """
    state: Any = _api._post_hook_state
    before = state.get_global()

    def hook(jitted: Any, args: Any, kwargs: Any, out: Any) -> None:
        if before is not None:
            before(jitted, args, kwargs, out)
        function(jitted)

    def undo() -> None:
        # Other code may have put its hook over ours since; taking that away would disable it.
        if state.get_global() is hook:
            state.set_global(before)

    hook.undo = undo  # type: ignore[attr-defined]
    state.set_global(hook)
    return undo


def is_hooked(undo: Callable[[], None]) -> bool:
    """Whether the hook that `undo` removes is still installed: switching on JAX's NaN check replaces it."""
    hook: Any = _api._post_hook_state.get_global()
    return getattr(hook, "undo", None) is undo


def let_threads_have_the_hook() -> None:
    """Makes the hook of `call_after_each_jit` visible to all threads, this one included: JAX may hide it.

    JAX sets a thread's own hook to None whenever a NaN check may have ended there, and each evaluation of a jaxpr may
    end one (0.8 to 0.12). Without this, the hook is not called on that thread from then on.
    """
    _keep_hooks()
    _restore_hook()


def call_after_each_dispatch(function: Callable[[], None]) -> None:
    """Has JAX call `function()` after each program that any thread dispatches, also after first calls, which compile.

    A call that is not on the fast path ends in `pxla.ExecuteReplicated` (0.8 to 0.12). Without it, threads whose calls
    all compile go on while the process ends.
    """
    call_after_each_jit(lambda jitted: function())
    let_threads_have_the_hook()
    executable = getattr(_pxla, "ExecuteReplicated", None)
    if executable is not None:
        executable.__call__ = _followed(executable.__call__, function)


def _followed(call: Callable[..., Any], function: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_and_more(self: Any, *args: Any) -> Any:
        try:
            return call(self, *args)
        except KeyboardInterrupt as error:  # JAX leaves its frames
            error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            raise
        finally:
            function()

    return call_and_more


def notice_dispatches(note: Callable[[], None]) -> None:
    """Has JAX call `note()` after each program that the calling thread dispatches from now on.

    JAX has a hook for each thread, in which a call on the fast path ends; any other call ends in
    `pxla.ExecuteReplicated` (0.8 to 0.12). `note` is also called when a NaN check begins or ends on the thread, and so
    takes the hook away. Without it, it is not known whether a tap function has dispatched a program.

    Raises:
        LookupError: this JAX lacks one of the two.
    """
    executable = getattr(_pxla, "ExecuteReplicated", None)
    if executable is None or not hasattr(_api, "_post_hook_state"):
        raise LookupError("jax._src has no pxla.ExecuteReplicated or no api._post_hook_state")
    _keep_hooks()
    call: Any = executable.__call__
    if not hasattr(call, "notices"):
        noticing: Any = _followed(call, _note)
        noticing.notices = True
        executable.__call__ = noticing
    _this_thread.note = note
    _restore_hook()


class _ThisThread(threading.local):
    note: Callable[[], None] | None = None  # see `notice_dispatches`


_this_thread = _ThisThread()


def _note() -> None:
    if _this_thread.note is not None:
        _this_thread.note()


class _OwnHook:
    # The hook of a thread whose dispatches are noticed, in front of the one that JAX wants there.

    def __init__(self, note: Callable[[], None], wanted: Any) -> None:
        self._note, self._wanted = note, wanted

    def __call__(self, *call: Any) -> None:
        self._note()
        is_unset = self._wanted is _config.config_ext.unset
        wanted = _api._post_hook_state.get_global() if is_unset else self._wanted
        if wanted is not None:
            wanted(*call)


def _keep_hooks() -> None:
    for flag in (_config.debug_nans, _config.debug_infs):
        checked: Any = flag
        update = checked._update_thread_local_hook
        if not isinstance(update, _KeepingTheHook):
            checked._update_thread_local_hook = _KeepingTheHook(update)


class _KeepingTheHook:
    # What JAX calls when a thread's own setting of a NaN check changes.

    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def __call__(self, value: Any) -> None:
        self._update(value)
        _restore_hook()


def _restore_hook() -> None:
    state: Any = _api._post_hook_state
    wanted, note = state.get_local(), _this_thread.note
    if isinstance(wanted, _OwnHook):
        return
    everywhere = _config.debug_nans.get_global() or _config.debug_infs.get_global()
    if wanted is None and not everywhere:
        wanted = _config.config_ext.unset
    if note is not None:
        note()  # programs may have been dispatched under the other hook
        wanted = _OwnHook(note, wanted)
    state.set_local(wanted)


def wrap_outermost_lowering(
    wrap: Callable[[Any, str, Sequence[bool], Sequence[Any], int], Any],
    look: Callable[[Any, str], None],
    tell_unplaced: Callable[[str], None],
) -> None:
    """Has JAX lower `wrap(closed, name, ...)` where it lowers a program as a whole, whichever jit it is of.

    Every outermost jit ends in `pxla.lower_sharding_computation`, and there in `_cached_lowering_to_hlo`, which gets
    the program after dead code, references and donation have been dealt with (0.8 to 0.12). Without it, programs with
    effects leave JAX's C++ dispatch path: 100 us a call instead of 5. Programs that are exported stay as they are:
    their effects tell the process that runs them that they hold taps.

    Args:
        wrap: gets the closed jaxpr, the name of the module (`jit(step)`), which of its inputs are donated, their
            shardings, and the number of devices that it is for; returns a closed jaxpr with the same inputs and
            results.
        look: is called with the closed jaxpr and the name of a program that is exported.
        tell_unplaced: is called with the name of a program that is lowered as it was, since its devices were not
            found and may be those of several processes.

    Raises:
        LookupError: this JAX lowers its programs in another way. Nothing has been changed then.
    """
    lower = getattr(_pxla, "_cached_lowering_to_hlo", None)
    outer = inspect.unwrap(getattr(_pxla, "lower_sharding_computation", len))
    calls = getattr(getattr(outer, "__code__", None), "co_names", ())
    if lower is None or "_cached_lowering_to_hlo" not in calls:
        raise LookupError("jax._src.interpreters.pxla does not lower through _cached_lowering_to_hlo")
    # The cached function is C++ and shows no signature.
    parameters = list(inspect.signature(outer).parameters)
    if parameters[:1] != ["closed_jaxpr"] or "lowering_parameters" not in parameters:
        raise LookupError(f"pxla.lower_sharding_computation takes ({', '.join(parameters)})")

    @in_place_of(lower)
    def lower_wrapped(closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        how = kwargs.get("lowering_parameters")
        # Exported programs keep their effects: the process that runs them starts its receivers when it hashes
        # them.
        name = args[0] if args and isinstance(args[0], str) else ""
        if how is not None and how.for_export:
            look(closed_jaxpr, name)
        elif how is not None:
            count = len(closed_jaxpr.in_avals)
            donated, shardings = _donated(args, count), _shardings(args, count)
            wrapped = wrap(closed_jaxpr, name, donated, shardings, _devices(args))
            placed = args if wrapped is closed_jaxpr else _with_assignment(args, closed_jaxpr)
            if placed is None:
                tell_unplaced(name)
            else:
                unchanged = wrapped is closed_jaxpr
                with contextlib.nullcontext() if unchanged else without_constant_folding():
                    return lower(wrapped, *placed, **kwargs)
        return lower(closed_jaxpr, *args, **kwargs)

    module: Any = _pxla
    module._cached_lowering_to_hlo = lower_wrapped


def without_constant_folding() -> contextlib.AbstractContextManager[None]:
    """A block for traces within `jax.ensure_compile_time_eval`, in which JAX evaluates operations of constants at once.

    JAX evaluates none of them where it traces an operation outside of jit (0.8 to 0.12). Where one is traced again to
    be lowered, or a part of it by a lowering rule, the operation that is evaluated may be the one that is lowered.
    """
    block: contextlib.AbstractContextManager[None] = _config.eager_constant_folding(False)
    return block


def _donated(args: Sequence[Any], count: int) -> Sequence[bool]:
    # The position of `donated_invars` differs between versions; it is the only sequence of bools, and begins with
    # hoisted constants where there are any.
    for arg in args:
        if (
            isinstance(arg, tuple | list)
            and len(arg) >= count > 0
            and all(type(item) is bool for item in arg)
        ):
            return tuple(arg[len(arg) - count :])
    return (False,) * count


def in_place_of(replaced: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns `function` with the attributes of the JAX function that it replaces, such as `cache_clear`.

    Functions with JAX's caches are C++ objects (0.8 to 0.12), whose methods `functools.wraps` leaves out. Without them,
    `jax._src.interpreters.pxla._cached_lowering_to_hlo.cache_info()`, with which JAX and its users count lowerings,
    raises AttributeError.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in dir(replaced):
            if not name.startswith("__"):
                setattr(function, name, getattr(replaced, name))
        return functools.wraps(replaced)(function)

    return decorate


def _shardings(args: Sequence[Any], count: int) -> Sequence[Any]:
    # The first object with shardings has those of the inputs, the second those of the results; they begin with hoisted
    # constants too. None where nothing is specified.
    for arg in args:
        found = getattr(arg, "shardings", None)
        if isinstance(found, tuple | list) and len(found) >= count:
            last = found[len(found) - count :]
            return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in last)
    return (None,) * count


def _devices(args: Sequence[Any]) -> int:
    # `num_devices` is the last integer among them, after `num_const_args` (0.8 to 0.12); flags are bools.
    return next((arg for arg in reversed(args) if type(arg) is int), 1)


def _with_assignment(args: tuple[Any, ...], closed: ClosedJaxpr) -> tuple[Any, ...] | None:
    # The devices of a program come after their number, but None if JAX found none of our primitives in the program that
    # was not wrapped yet (0.8 to 0.12). Then they are those of a sharding of its inputs, its results or within it, or
    # of the mesh around it (`pxla._get_and_check_device_assignment`). Returns None if they are not found and may be
    # those of several processes: no process would know that the messages are its own.
    count = _devices(args)
    place = next((i for i in reversed(range(len(args))) if type(args[i]) is int), len(args)) + 1
    if count == 1 or place >= len(args) or args[place] is not None:
        return args
    shardings = [s for arg in args for s in getattr(arg, "shardings", ())]
    shardings += [s for s, _ in _dispatch.get_intermediate_shardings(closed.jaxpr)]
    for devices in (*map(_assigned, shardings), *_devices_around()):
        if len(devices) == count:
            return (*args[:place], devices, *args[place + 1 :])
    return args if jax.process_count() == 1 else None


def _assigned(sharding: Any) -> tuple[Any, ...]:
    # The devices of a sharding; none where it has no devices yet.
    is_abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return () if is_abstract else tuple(getattr(sharding, "_device_assignment", None) or ())


def _devices_around() -> Iterator[tuple[Any, ...]]:
    # Those of `jax.set_mesh`, which any jit takes, then those of `with mesh:`, which pjit takes (0.8 to 0.12).
    concrete = getattr(_mesh, "get_concrete_mesh", None)
    env = getattr(getattr(_mesh, "thread_resources", None), "env", None)
    for mesh in (concrete and concrete(), getattr(env, "physical_mesh", None)):
        if mesh is not None:
            yield tuple(mesh.devices.flat)


def as_one_equation(
    closed: ClosedJaxpr, inner: ClosedJaxpr, primitive: Primitive, effects: set[Effect]
) -> Any:
    """Wraps the program `closed` into one equation of `primitive` that has these effects.

    Args:
        closed: the program, whose inputs and results it keeps.
        inner: what it runs, a closed jaxpr of the constants and inputs of `closed`; the equation's parameter `closed`.
        primitive: the primitive.
        effects: of the equation.
    """
    operands = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    results = [_core.Var(aval) for aval in inner.out_avals]
    equation = _core.new_jaxpr_eqn(
        operands, results, primitive, {"closed": inner}, effects, _source_info_util.new_source_info()
    )
    outer = closed.jaxpr.replace(
        eqns=[equation], outvars=results, effects=effects, debug_info=closed.jaxpr.debug_info
    )
    return closed.replace(jaxpr=outer)


def register_effect(effect_type: type[Effect], *, ordered: bool) -> None:
    """Allows an effect in every place where JAX checks effects; an ordered one also on several devices.

    Without it, control flow, checkpoints, custom derivatives and lowering refuse programs with the effect (0.8 to
    0.12).
    """
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


def has_effect(program: AnyJaxpr | JaxprEqn, effect_type: type[Effect]) -> bool:
    """Whether a closed jaxpr, or an equation, has an effect of that type."""
    return any(isinstance(effect, effect_type) for effect in program.effects)


def has_input_effect(program: AnyJaxpr | JaxprEqn) -> bool:
    """Whether a closed jaxpr reads or writes references that it takes as arguments."""
    return any(isinstance(effect, _effects.JaxprInputEffect) for effect in program.effects)


def has_ordered_io_effect(closed: ClosedJaxpr) -> bool:
    """Whether a closed jaxpr has an ordered `io_callback`: JAX refuses loops with one under vmap (0.8 to 0.12)."""
    return _callback._OrderedIOEffect in closed.effects


def add_effects(primitive: Primitive, effects_of: Callable[[dict[str, Any]], set[Any]]) -> None:
    """Gives the equations of one of JAX's primitives more effects: those that `effects_of` finds for its parameters.

    Without it, the primitives of kernels and of custom partitioning hide the effects of the programs they hold (0.8 to
    0.12): the program around them has no token for the taps in there.
    """
    evaluate: Any = primitive.abstract_eval  # which returns effects as well, however it was registered

    @functools.wraps(evaluate)
    def evaluate_with_effects(*avals: Aval, **params: Any) -> Any:
        avals_out, effects = evaluate(*avals, **params)
        more = effects_of(params)
        return avals_out, {*effects, *more} if more else effects

    primitive.def_effectful_abstract_eval(evaluate_with_effects)


def tokens_are_set(ctx: LoweringRuleContext) -> bool:
    """Whether a lowering rule has set the tokens of its equation's ordered effects."""
    return ctx.tokens_out is not None


def pass_tokens(ctx: LoweringRuleContext) -> None:
    """Passes an equation's tokens through unchanged."""
    ctx.set_tokens_out(ctx.tokens_in)


# ---- Exported programs -----------------------------------------------------------------------------------------------


def rewrite_in_exported(name: str, effect_type: type[Effect], rewrite: Callable[[Any, str], str]) -> None:
    """Lets `rewrite(ctx, config)` replace the configuration of the calls `name` in exported programs with the effect.

    JAX merges an exported program into the one that calls it when it lowers that one, and its rule for that (0.8 to
    0.12) leaves the calls as they were where the program was exported, on other devices. JAX tells the rule of the
    devices only where a program needs them, which it asks by primitive (`jaxpr_has_prim_requiring_devices`, 0.8 to
    0.12). Exported programs without the effect are left to JAX: those that need devices may have one mesh only, and are
    lowered again for each device.
    """
    primitive, rule = _export.call_exported_p, _export._call_exported_lowering
    needs_devices = _dispatch.jaxpr_has_prim_requiring_devices

    def has_effect(effects: Iterable[Effect]) -> bool:
        return any(isinstance(effect, effect_type) for effect in effects)

    def lower(ctx: LoweringRuleContext, *args: Any, exported: Any) -> Any:
        results = rule(ctx, *args, exported=exported)
        tapped = has_effect((*exported.ordered_effects, *exported.unordered_effects))
        if tapped and not ctx.module_context.lowering_parameters.for_export:
            ctx.module_context.module.operation.walk(functools.partial(_rewrite, ctx, name, rewrite))
        return results

    @in_place_of(needs_devices)
    def needs_devices_or_has_effect(jaxpr: Any) -> bool:
        return needs_devices(jaxpr) or has_effect(jaxpr.effects)

    module: Any = _dispatch
    module.jaxpr_has_prim_requiring_devices = needs_devices_or_has_effect
    _mlir.register_lowering(primitive, lower)


def _rewrite(ctx: LoweringRuleContext, name: str, rewrite: Callable[[Any, str], str], operation: Any) -> Any:
    attributes = operation.attributes
    if (
        operation.name == "stablehlo.custom_call"
        and _ir.StringAttr(attributes["call_target_name"]).value == name
    ):
        config = _ir.StringAttr(attributes["backend_config"]).value
        attributes["backend_config"] = _ir.StringAttr.get(rewrite(ctx, config))
    return _ir.WalkResult.ADVANCE


def explain_refused_export(targets: Sequence[str], explain: Callable[[str, str], str]) -> None:
    """Raises `ValueError(explain(target, place))` where JAX refuses to export a program because it calls a target.

    JAX's own text, in `_check_module` (0.8 to 0.12), is general: it names no way to allow the call. It is the cause of
    the error. `place` is `file:line` of the call; empty if JAX knows none.
    """
    check = _export._check_module

    @in_place_of(check)
    def check_module(module: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return check(module, *args, **kwargs)
        except ValueError as error:
            allowed = {disabled.is_custom_call() for disabled in kwargs.get("disabled_checks", ())}
            found: dict[str, str] = {}
            module.operation.walk(functools.partial(_note_call, found))
            for target in targets:
                if target in found and target not in allowed:
                    raise ValueError(explain(target, found[target])) from error
            raise

    exporting: Any = _export
    exporting._check_module = check_module


def _note_call(found: dict[str, str], operation: Any) -> Any:
    # Adds a custom call's target, and the place of its first call in the user's code.
    if operation.name == "stablehlo.custom_call":
        target = _ir.StringAttr(operation.attributes["call_target_name"]).value
        place = re.search(r'"([^"]+)":(\d+)', str(operation.location))
        found.setdefault(target, f"{place[1]}:{place[2]}" if place else "")
    return _ir.WalkResult.ADVANCE
