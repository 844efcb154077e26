"""The traces that the calling thread is in, and the tracers that belong to them."""

from __future__ import annotations

from types import FrameType
from typing import Any, Literal

from jax._src import (
    array as _array,  # ArrayImpl: the type of concrete arrays, checked on the dispatch path
    core as _core,  # trace_ctx, eval_trace, Tracer: not in jax.extend.core
    util as _util,  # weakref_cache_key_types
)
from jax._src.interpreters import (
    batching as _batching,  # BatchTrace
    partial_eval as _pe,  # DynamicJaxprTrace
)

ArrayImpl: Any = _array.ArrayImpl
# `trace_context.trace is eval_trace` says that the calling thread is outside every JAX transformation and trace
# (0.8 to 0.12). `trace_context.is_top_level()` says the same in six times the time, which every call would pay.
trace_context: Any = _core.trace_ctx
eval_trace: Any = _core.eval_trace


def outside_traces() -> bool:
    """Whether the calling thread is outside every JAX transformation and trace."""
    return trace_context.trace is eval_trace


def is_staging() -> bool:
    """Whether what the calling thread computes now, under whatever transformation, becomes part of a program."""
    trace: Any = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_batching() -> bool:
    """Whether the calling thread is in a vmap, under whatever transformation."""
    trace: Any = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _batching.BatchTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


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


def escaped_tracer_error(value: Any) -> Exception | None:
    """JAX's error for a tracer whose trace is over; None for every other value.

    JAX (0.8 to 0.12) takes most such tracers for constants of the current trace, and raises only when the program
    runs, far from the line that used them. A tracer is alive if its trace is current or encloses the current one; if a
    kind of trace does not know what encloses it, JAX decides.
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


def _are_one(trace: Any, other: Any) -> bool:
    # JAX makes several objects for one trace (0.8 to 0.12); they share a tag.
    return trace is other or getattr(trace, "tag", trace) is getattr(other, "tag", other)


def is_frame_of_jit(frame: FrameType) -> bool:
    """Whether a frame is of `jax.jit`'s own code: the jaxpr of a function that it calls outlives the outer trace."""
    return frame.f_globals.get("__name__") == "jax._src.pjit"  # from 0.4 to 0.12


def tracing_for(frame: FrameType | None) -> str | None:
    """For which code with a special lowering a frame's thread is tracing; None for ordinary programs.

    Such code is a Pallas kernel, the body of a custom partitioning, or a function by which a lowering rule is written
    (`mlir.lower_fun`). The effects of its equations get into no program's list of effects. JAX sets no mark while it
    traces for one, so this looks for the modules and the function that do it (0.8 to 0.12).
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


def cache_weakly(key_type: type[Any]) -> None:
    """Keeps JAX's caches from keeping equation parameters of that type alive.

    `_cached_abstract_eval` and others (0.8 to 0.12) hold their keys strongly unless the type is one of these: without
    it, they keep what the user's function refers to.
    """
    _util.weakref_cache_key_types.add(key_type)
