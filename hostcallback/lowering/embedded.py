"""Taps in programs that others hold: exported programs, Pallas kernels, `jax.experimental.custom_partitioning`.

A function with `custom_partitioning`: on one device, and if each device runs a separate program, JAX inlines it with
its taps. If the compiler partitions, XLA asks the function's `partition` rule for the body of each device, and JAX
lowers the body as a separate program. Here the body becomes one equation, which makes the token of its taps.

JAX 0.8 to 0.12 treats a kernel as a function without effects. In interpret mode a kernel becomes a loop over its grid
in the surrounding program. This module adds the kernel's tap effects to the equation, so that JAX passes their token
through that loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering import cells, partition
from hostcallback.primitives.call import call_p
from hostcallback.primitives.cells import read_cell_p
from hostcallback.primitives.effects import TapEffect
from hostcallback.primitives.tap import tap_p, when_imported

TARGETS = (
    transport.FFI_TARGET,
    transport.FFI_SHARD_TARGET,
    transport.FFI_CLOCK_TARGET,
    transport.FFI_CELL_TARGET,
    partition.CALL_NAME,
    cells.PARTITIONED_NAME,
)
"""Of taps, progress bars and knobs. A program with calls (`hcb.call`) cannot be exported."""


_WHAT = {
    transport.FFI_CLOCK_TARGET: "reads the clock for a progress bar",
    transport.FFI_CELL_TARGET: "reads a knob",
    cells.PARTITIONED_NAME: "reads a knob",
}


def _explain(target: str, line: str) -> str:
    what = _WHAT.get(target, "has a tap")
    return (
        f"jax.export got a program that {what}{line and f' at {line}'}, and no permission for the custom call "
        f"{target}: pass disabled_checks=hcb.export_checks() to jax.export.export. The process that runs the program "
        "imports hostcallback, and gives taps with functions theirs by hcb.bind"
    )


compat.explain_refused_export(TARGETS, _explain)


def _let_taps_in(name: str, module: Any) -> None:
    """Adds the tap effects of kernels to the primitive that runs them, if this JAX version has the primitive."""
    primitive = getattr(module, name, None)
    if primitive is not None:
        compat.add_effects(primitive, _effects_of_kernels)


def _effects_of_kernels(params: dict[str, Any]) -> set[compat.Effect]:
    kernels = compat.kernel_jaxprs(params)
    effects: set[compat.Effect] = {
        effect for kernel in kernels for effect in kernel.effects if isinstance(effect, TapEffect)
    }
    if effects and not params.get("interpret"):
        raise NotImplementedError(_refusal(kernels))
    return effects


def _refusal(kernels: Any) -> str:
    equation = next(compat.equations_of(kernels, _PRIMITIVES))
    return (
        f"the {_described(equation)} is in a Pallas kernel that is compiled, and from inside of one "
        "nothing reaches the host: run the kernel with interpret=True, let it write the values to an output and tap "
        "that behind pallas_call, or use pl.debug_print"
    )


_PRIMITIVES = (tap_p, call_p, read_cell_p)


def _described(equation: compat.JaxprEqn) -> str:
    params = equation.params
    if equation.primitive is read_cell_p:
        return f"read of {params['cell'].name} at {params['site']}"
    what, spec = ("tap", params["tap"]) if equation.primitive is tap_p else ("call of", params["call"])
    return f"{what} {spec.name} at {spec.source_line}"


for module_name, primitive_name in compat.KERNEL_PRIMITIVES:
    when_imported(module_name, functools.partial(_let_taps_in, primitive_name))


class _Kept:
    """Objects that a program keeps alive for the bodies that it gets during compilation."""

    def __init__(self) -> None:
        self.leases: list[Any] = []


_body_p = compat.Primitive("tapped_partition")
_body_p.multiple_results = True


def _abstract(*avals: compat.Aval, closed: compat.ClosedJaxpr, kept: Any) -> Any:
    return closed.out_avals, {e for e in closed.effects if not isinstance(e, TapEffect)}


def _lower(
    ctx: compat.LoweringRuleContext, *operands: compat.IrValue, closed: compat.ClosedJaxpr, kept: _Kept
) -> Sequence[compat.IrValue]:
    _check_body(compat.LoweringContext(ctx), closed)
    return compat.lower_discharged(compat.keeping_alive_in(ctx, kept.leases), closed, operands, TapEffect)


def _with_taps(body: Callable[..., Any], kept: _Kept) -> Callable[..., Any]:
    # Returns the body of a device, as one equation if it has taps.
    @functools.wraps(body)
    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
        if not compat.has_effect(closed, TapEffect):
            return body(*args)
        closed, consts = compat.constants_to_inputs(compat.lower_to_primitives(closed))
        outs = _body_p.bind(*consts, *jax.tree.leaves(args), closed=closed, kept=kept)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def _lowering(lower: Callable[..., Any]) -> Callable[..., Any]:
    # JAX's rule, with taps in the bodies.
    @functools.wraps(lower)
    def lower_with_taps(
        ctx: compat.LoweringRuleContext, *operands: compat.IrValue, call: Any, partition: Any, **params: Any
    ) -> Sequence[compat.IrValue]:
        kept = _Kept()

        @functools.wraps(partition)
        def partition_with_taps(*args: Any) -> Any:
            mesh, body, result_sharding, arg_shardings = partition(*args)
            return mesh, _with_taps(body, kept), result_sharding, arg_shardings

        results: Sequence[compat.IrValue] = lower(
            ctx, *operands, call=call, partition=partition_with_taps, **params
        )
        if compat.tokens_are_set(ctx):  # it was inlined
            return results
        ctx.module_context.add_keepalive(kept)
        if compat.has_effect(call, TapEffect):
            context = compat.LoweringContext(ctx)
            _check_body(context, call)
            context.avoid_persistent_cache()
            compat.mark_side_effect(results)
            compat.pass_tokens(ctx)
        return results

    return lower_with_taps


def _check_body(context: compat.LoweringContext, closed: compat.ClosedJaxpr) -> None:
    """Refuses taps and calls that a device cannot run in such a body."""
    for equation in compat.equations_of([closed.jaxpr], _PRIMITIVES):
        if equation.primitive is tap_p and transport.use_native(context.platform):
            continue
        raise NotImplementedError(
            f"the {_described(equation)} is in a function with "
            "custom_partitioning, in a program that the compiler partitions, where only taps can be, on the native "
            "transport: move it out of the function, or put the code around it into jax.shard_map over all axes of the "
            "mesh, where each device taps and calls with its shard"
        )


def _tap_effects(params: dict[str, Any]) -> set[compat.Effect]:
    return {effect for effect in params["call"].effects if isinstance(effect, TapEffect)}


_body_p.def_effectful_abstract_eval(_abstract)
compat.register_lowering(_body_p, _lower)
compat.add_effects(compat.custom_partitioning_p, _tap_effects)
compat.wrap_custom_partitioning(_lowering)
