"""Traces and tracers; programs (jaxprs) and their equations: parts, evaluation, and JAX's rules for some."""

from __future__ import annotations

import functools
import inspect
import os
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    ad_checkpoint as _ad_checkpoint,  # remat_p
    api_util as _api_util,  # fun_sourceinfo
    array as _array,  # ArrayImpl: the type of concrete arrays, checked on the dispatch path
    core as _core,  # trace_ctx, eval_trace, Tracer: not in jax.extend.core
    custom_derivatives as _custom_derivatives,  # custom_jvp_call_p, custom_vjp_call_p
    pjit as _pjit,  # jit_p
    sharding_impls as _sharding_impls,  # UnspecifiedValue
    util as _util,  # weakref_cache_key_types
)
from jax._src.interpreters import (
    ad as _ad,  # Zero
    batching as _batching,  # BatchTrace
    partial_eval as _pe,  # DynamicJaxprTrace
)
from jax._src.lax.control_flow import (
    conditionals as _conditionals,  # cond_p
    loops as _loops,  # _scan_known_hoisting, scan_p, while_p
)

from hostcallback._jax_compat import versions
from hostcallback._jax_compat.types import AnyJaxpr, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Tracer

ArrayImpl: Any = _array.ArrayImpl
# `trace_context.trace is eval_trace` says that the calling thread is outside every JAX transformation and trace
# (0.8 to 0.12). `trace_context.is_top_level()` says the same in six times the time, which every call would pay.
trace_context: Any = _core.trace_ctx
eval_trace: Any = _core.eval_trace

# Of a symbolic dimension whose value is asked for; `jax.errors` has it in later versions only.
InconclusiveDimensionOperation: type[Exception] = _core.InconclusiveDimensionOperation


def outside_traces() -> bool:
    """Whether the calling thread is outside every JAX transformation and trace."""
    return trace_context.trace is eval_trace


def is_staging() -> bool:
    """Whether what the calling thread computes now, under whatever transformation, becomes part of a program."""
    if outside_traces():
        return False
    return any(isinstance(trace, _pe.DynamicJaxprTrace) for trace in _traces())


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is in force in the calling thread."""
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def is_batching() -> bool:
    """Whether the calling thread is in a vmap, under whatever transformation."""
    return any(isinstance(trace, _batching.BatchTrace) for trace in _traces())


def _traces() -> Iterator[Any]:
    # The current trace, and those around it as far as they are known.
    trace: Any = _core.trace_ctx.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def in_manual_region() -> bool:
    """Whether the calling thread traces the body of a shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def in_partially_manual_region() -> bool:
    """Whether the calling thread traces the body of a shard_map that leaves some axes to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and not mesh.are_all_axes_manual


def trace_of(tracer: Tracer) -> typing.Literal["this", "outer"] | None:
    """Where a tracer's trace is, relative to the current one; None if it has ended, is inner, or of another kind.

    "this" also means transformations (vmap, jvp) around which nothing was traced to a jaxpr since: only tracers of
    those may go into the current jaxpr without it depending on what encloses it, from where JAX's caches of jaxprs
    (of inner jits and loop bodies, 0.8 to 0.12) take it elsewhere.
    """
    found: typing.Literal["this", "outer"] = "this"
    for trace in _traces():
        if trace is not eval_trace and _are_one(trace, tracer._trace):
            return found
        if isinstance(trace, _pe.DynamicJaxprTrace):
            found = "outer"
    return found if found == "outer" and _is_traced_around(tracer) else None


def escaped_tracer_error(value: object) -> Exception | None:
    """JAX's error for a tracer whose trace has ended; None for every other value.

    JAX (0.8 to 0.12) takes most such tracers for constants of the current trace, and raises only when the program
    runs, far from the line that used them. A tracer is alive if its trace is current or encloses the current one; if a
    kind of trace does not know what encloses it, JAX decides of all but tracers of programs.
    """
    if not isinstance(value, _core.Tracer):
        return None
    for trace in _traces():
        if _are_one(trace, value._trace):
            return None
        if trace is eval_trace:
            break
    else:
        if not isinstance(value._trace, _pe.DynamicJaxprTrace):
            return None
    if is_staging() and _is_traced_around(value):
        return None
    escaped: Exception = _core.escaped_tracer_error(value)
    return escaped


def _is_traced_around(tracer: Tracer) -> bool:
    # Whether a caller of this function traces the program that the tracer is of. The traces of functions of custom_jvp
    # and custom_vjp know none around them (0.8 to 0.12): only the stack shows that there is one.
    trace = tracer._trace
    return isinstance(trace, _pe.DynamicJaxprTrace) and any(
        trace is value
        for frame, _ in traceback.walk_stack(None)
        if frame.f_globals.get("__name__", "").startswith("jax.")
        for value in frame.f_locals.values()
    )


def _are_one(trace: Any, other: Any) -> bool:
    # JAX makes several objects for one trace (0.8 to 0.12); they share a tag.
    return trace is other or getattr(trace, "tag", trace) is getattr(other, "tag", other)


def is_frame_of_jit(frame: FrameType) -> bool:
    """Whether a frame is of `jax.jit`'s own code: the jaxpr of a function that it calls outlives the outer trace."""
    return frame.f_globals.get("__name__") == "jax._src.pjit"  # from 0.4 to 0.12


def tracing_for(frame: FrameType) -> str | None:
    """The kind of specially lowered code that a frame's thread is tracing; None for ordinary programs.

    Such code is a Pallas kernel, the body of a custom partitioning, or a function by which a lowering rule is written
    (`mlir.lower_fun`). The effects of its equations get into no program's list of effects. JAX sets no mark while it
    traces for one, so this looks for the modules and the function that do it (0.8 to 0.12).
    """
    for caller, _ in traceback.walk_stack(frame):
        module = caller.f_globals.get("__name__", "")
        if module == "jax._src.interpreters.mlir" and caller.f_code.co_name == "f_lowered":
            return "a lowering rule"
        if module.startswith("jax._src.pallas."):
            return "a Pallas kernel"
        if module == "jax._src.custom_partitioning":
            return "the body of a custom partitioning"
    return None


UNKNOWN_FUNCTION = "<unknown>"
"""What JAX calls a function of which it knows no source: the one of `lower().compile()`, for example (0.8 to 0.12)."""


def traced_function(closed: ClosedJaxpr) -> str | None:
    """Name and source line of the function that a program was traced from, in the form of `source_of`."""
    name = getattr(closed.jaxpr.debug_info, "func_src_info", None)
    return None if name is None else str(name)


def is_eager(closed: ClosedJaxpr) -> bool:
    """Whether a program is of a function of JAX or of this package: an operation outside of jit, such as `jit(sin)`.

    Not so `jax.pmap`, which jits a function of JAX around the user's (0.8 to 0.12), see `is_pmap`.
    """
    source = traced_function(closed) or ""
    folders = [
        os.path.dirname(path) + os.sep for path in (jax.__file__, os.path.dirname(os.path.abspath(__file__)))
    ]
    return any(folder in source for folder in folders) and not is_pmap(closed)


def is_pmap(closed: ClosedJaxpr) -> bool:
    """Whether a program is of `jax.pmap`: of a function in JAX's `pmap.py`, until 0.8 of a `linear_util.WrappedFun`."""
    source = traced_function(closed) or ""
    return any(f"{os.sep}{file}:" in source for file in ("pmap.py", "linear_util.py"))


def source_of(function: Any) -> str:
    """Name and source line of a function, jitted or not, as JAX's traces note them (0.8 to 0.12)."""
    wrapped = inspect.unwrap(function)
    # Until 0.12, JAX does not look into a partial: without this, the name is not the one that the trace has.
    while isinstance(wrapped, functools.partial):
        wrapped = inspect.unwrap(wrapped.func)
    return str(_api_util.fun_sourceinfo(wrapped))


def is_jaxs_own(function: Any) -> bool:
    """Whether JAX defines the function itself, in one of its private modules (0.8 to 0.12)."""
    return (getattr(function, "__module__", None) or "").startswith("jax._src.")


def cache_weakly(key_type: type[Any]) -> None:
    """Keeps JAX's caches from keeping equation parameters of that type alive.

    `_cached_abstract_eval` and others (0.8 to 0.12) hold their keys strongly unless the type is one of these: without
    it, they keep what the user's function refers to.
    """
    _util.weakref_cache_key_types.add(key_type)


# These and the types in `types` are in jax.extend.core too. To import any of jax.extend takes longer than `import
# hostcallback`, and from 0.12 on it loads Pallas, whose settings make JAX trace and compile once more all that it has
# compiled before.
cond_p: Primitive = _conditionals.cond_p
custom_jvp_call_p: Primitive = _custom_derivatives.custom_jvp_call_p
custom_vjp_call_p: Primitive = _custom_derivatives.custom_vjp_call_p
jit_p: Primitive = _pjit.jit_p
scan_p: Primitive = _loops.scan_p
while_p: Primitive = _loops.while_p
INLINE_CALLS = ("core_call", "closed_call", "core_closed_call", "call")
"""Primitives that only call a program."""


def eval_jaxpr(program: AnyJaxpr, *args: Any) -> list[Any]:
    """Evaluates a jaxpr, closed or without constants."""
    jaxpr, consts = open_jaxpr(program)
    return _core.eval_jaxpr(jaxpr, consts, *args)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and the values of its constants. From 0.12 on there is one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def equations_of(jaxprs: Iterable[AnyJaxpr], primitives: Sequence[Primitive]) -> Iterator[JaxprEqn]:
    """Every equation of one of the primitives in the jaxprs, and in those within them."""
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            if equation.primitive in primitives:
                yield equation
        yield from equations_of(_core.subjaxprs(open_jaxpr(jaxpr)[0]), primitives)


def constants_to_inputs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[jax.Array]]:
    """The same program with its constants as leading inputs, and those constants."""
    jaxpr = _pe.convert_constvars_jaxpr(closed.jaxpr)
    return _pe.close_jaxpr(jaxpr), list(closed.consts)


def lower_to_primitives(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program without "high-level" equations, which have no lowering rules.

    They came with 0.8; `jax.lax.custom_root` is one since 0.12. Without it, the lowering of such a program raises that
    it found no rule. A program that takes or returns high-level values stays as it is.
    """
    if not closed.jaxpr.is_high or any(aval.is_high for aval in (*closed.in_avals, *closed.out_avals)):
        return closed
    lowered: ClosedJaxpr = versions.lower_to_lojaxpr(closed)
    return lowered


def bind_equation(equation: JaxprEqn, values: Sequence[jax.Array]) -> list[Any]:
    """Evaluates one equation on other values; the rules of custom derivatives stay with it."""
    bind_params: Any = equation.primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(bind_params, tuple):  # until 0.9; then the functions are among the parameters
        functions, bind_params = bind_params
    outs = equation.primitive.bind(*functions, *values, **bind_params)
    return list(outs) if equation.primitive.multiple_results else [outs]


def weakly_typed(value: Any) -> Any:
    """The array as one whose dtype gives way to that of what it is combined with, as Python's numbers do."""
    return jax.lax.convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)


def scan_groups(params: dict[str, Any], operands: Sequence[Any]) -> list[list[jax.Array]]:
    """A scan's operands as constants, carry and what is scanned over."""
    if "ft_in" in params:  # from 0.12 on
        return [list(group) for group in params["ft_in"].update(list(operands)).unpack()]
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    return [list(operands[:first]), list(operands[first:second]), list(operands[second:])]


def jit_options(params: dict[str, Any]) -> dict[str, Any]:
    """What `jax.jit` takes of a nested jit's parameters, except its shardings; `inline` is a bool or an enum."""
    return {key: params[key] for key in ("keep_unused", "inline") if key in params}


def jit_shardings(params: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """`in_shardings` or `out_shardings` of a nested jit, for `jax.jit`; None where nothing is specified."""
    shardings = [None if isinstance(s, _sharding_impls.UnspecifiedValue) else s for s in params[name]]
    return None if all(s is None for s in shardings) else tuple(shardings)


def result_paths(closed: ClosedJaxpr) -> list[str]:
    """For each result of a program its path in what the function returns, such as `[0]['w']` (0.8 to 0.12)."""
    count = len(closed.jaxpr.outvars)
    paths = closed.jaxpr.debug_info.safe_result_paths(count)
    return [str(path or "").removeprefix("result") for path in paths]


def wrap_keys(data: Any, aval: Aval) -> Any:
    """Typed keys of the type `aval` from their data. A type has its implementation as `_impl` (0.8 to 0.12)."""
    return jax.random.wrap_key_data(jnp.asarray(data), impl=aval.dtype._impl)


def zero_keys(aval: Aval) -> Any:
    """Typed keys of the type `aval` whose data is zero."""
    return wrap_keys(np.zeros((*aval.shape, *aval.dtype._impl.key_shape), np.uint32), aval)


remat_p: Primitive = _ad_checkpoint.remat_p  # jax.extend.core.primitives has it since 0.10
batch_jaxpr: Any = _batching.batch_jaxpr2


def closed_jaxpr(function: Callable[..., Any], avals: Sequence[Aval]) -> ClosedJaxpr:
    """The closed jaxpr of a function that returns a list, without constants, for operands of these avals."""
    return jax.make_jaxpr(function)(*avals)


def aval_of_element(axis: Any, dim: int, batch: Any) -> Aval:
    """The aval of an element of a batch, mesh included, of what a batching rule gets: vmap, dimension and batch."""
    return _core.mapped_aval(axis.size, dim, jax.typeof(batch))


def zero_tangent(primal: Any) -> Any:
    """A symbolic zero for the tangent of a value."""
    aval: Aval = jax.typeof(primal)
    return _ad.Zero(aval.to_tangent_aval())


def wrap_scan_hoisting(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the function that takes loop-invariant code out of scans under differentiation.

    It is called as `hoist(closed_jaxpr, known_consts, *counts)` and returns the remaining closed jaxpr first (0.8 to
    0.12). It is in no table of rules: two of JAX's rules call it by name. Without it, a tap of a loop-invariant value
    is moved out of its loop and sends one message, or none, instead of one for each iteration (jax#16637).
    """
    _loops._scan_known_hoisting = wrapper(_loops._scan_known_hoisting)


KERNEL_PRIMITIVES = [
    ("jax._src.pallas.pallas_call", "pallas_call_p"),  # 0.8 to 0.12
    ("jax._src.pallas.core", "core_map_p"),  # until 0.11
    ("jax._src.pallas.mpmd", "mpmd_map_p"),  # from 0.10 on; before, core_map_p becomes pallas_call_p
]
"""Modules, imported with Pallas, and their primitives that run kernels."""


def kernel_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    """The kernels of an equation of such a primitive, and the index maps of their blocks (0.8 to 0.12)."""
    blocks = getattr(params.get("grid_mapping"), "block_mappings", ())
    kernels = params["jaxprs"] if "jaxprs" in params else (params["jaxpr"],)
    return [*kernels, *(open_jaxpr(block.index_map_jaxpr)[0] for block in blocks)]
