"""Corrects JAX's rules for loops and checkpoints with effects, so that no effect is lost, repeated or moved out.

JAX does not have these problems with its own effects, because it refuses them in these places or has an open issue.
Each correction replaces one rule in a table of JAX. The new rule calls JAX's rule for programs without the effect. The
last versions checked are JAX 0.8 to 0.12.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.interpreters import partial_eval

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Aval, ClosedJaxpr, Effect, JaxprEqn, Primitive
from hostcallback.tracing.source_line import first_user_line

# JAX's tables of rules for partial evaluation, which splits a program into a known part, run now, and an unknown part,
# run later. The first table is for tracers; the second is for jaxprs, in scans and in code that jax.checkpoint
# recomputes. A rule for jaxprs gets the equation, which operands are unknown, and which are available later. It returns
# the equation for now, the equation for later, which results are unknown, which are available later, and the variables
# to save.
on_tracers: Any = partial_eval.custom_partial_eval_rules
on_jaxprs: Any = partial_eval.partial_eval_jaxpr_custom_rules


def keep_in_scans(effect_type: type[Effect]) -> None:
    """Keeps equations with an effect inside the scans they were written in, under differentiation.

    JAX moves equations that depend only on a scan's constants out of the scan. It moves effects too, which then occur
    once (jax#16637), or never if they are in a `cond`. JAX finds these equations by a partial evaluation in which the
    constants are known. During that evaluation, each equation with the effect is wrapped in `_scan_pin_p`, which is
    never known.
    """
    split: Any = on_jaxprs[compat.scan_p]

    def wrap(equation: JaxprEqn) -> Any:
        # JAX itself leaves equations that read or write references in the scan.
        if not compat.has_effect(equation, effect_type) or compat.has_input_effect(equation):
            return equation
        return equation.replace(primitive=_scan_pin_p, params={"equation": equation})

    def hoisting(hoist: Any) -> Any:
        @functools.wraps(hoist)
        def hoist_the_rest(closed: ClosedJaxpr, consts: Any, *counts: Any) -> Any:
            if not compat.has_effect(closed, effect_type):
                # JAX's own way, unchanged, for programs without taps.
                return hoist(closed, consts, *counts)
            closed, *rest = hoist(_with_equations(closed, wrap), consts, *counts)
            return _with_equations(closed, _unwrap), *rest

        return hoist_the_rest

    @functools.wraps(split)
    def split_the_rest(
        saveable: Any, unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn
    ) -> Any:
        if not compat.has_effect(equation, effect_type):
            return split(saveable, unknown, there, equation)
        known, later, *rest = split(saveable, unknown, there, _with_body(equation, wrap))
        call = known.params["call_jaxpr"]  # the moved equations, and the remaining scan
        call = _with_equations(call, lambda e: _with_body(e, _unwrap) if e.primitive is compat.scan_p else e)
        return known.replace(params={**known.params, "call_jaxpr": call}), later, *rest

    compat.wrap_scan_hoisting(hoisting)
    on_jaxprs[compat.scan_p] = split_the_rest


def run_once_when_recomputed(effect_type: type[Effect], primitive: Primitive, stand_in: Primitive) -> None:
    """Keeps an effect out of the code that jax.checkpoint recomputes.

    In that code, `stand_in` replaces `primitive`, an identity with the effect. Without this rule JAX would save the
    results of `primitive`, and fail in a `while_loop`, where it cannot save them. A loop with the effect also runs
    once, unless it depends on differentiated values.
    """
    split_loop: Any = on_jaxprs[compat.while_p]
    drop: Any = partial_eval.dce_rules[compat.remat_p]

    def rule(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn) -> Any:
        if any(unknown):
            return _run_later(equation, there)
        recomputed = equation.replace(primitive=stand_in, params={}, effects=set())
        _, later, results, _, saved = _run_later(recomputed, there)
        return equation, later, [False] * len(results), results, saved

    @functools.wraps(split_loop)
    def loop_rule(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn) -> Any:
        if not compat.has_effect(equation, effect_type):
            return split_loop(saveable, unknown, there, equation)
        if not any(unknown):
            return _run_now(equation)
        try:
            return split_loop(saveable, unknown, there, equation)
        except AssertionError as error:  # JAX keeps nothing of the steps of such a loop (0.8 to 0.12)
            line = first_user_line(compat.equation_frames(equation))
            raise ValueError(
                "a while_loop in a jax.checkpoint depends on values that are differentiated, and its steps read a "
                "request to stop or call the host (hcb.while_loop(..., stop=True), hcb.call), expected one that does "
                "not: what they got cannot be kept for the second run, whose number of steps is not known. Use "
                "hcb.scan, or hcb.fori_loop with bounds that are not traced; or take the loop out of the checkpoint; "
                f"or pass what goes into the loop through jax.lax.stop_gradient, at {line or 'a line of JAX'}"
            ) from error

    @functools.wraps(drop)
    def drop_rule(*args: Any) -> Any:
        # Before 0.12, JAX drops a checkpointed program without operands and results exactly if it has an effect.
        used, kept = drop(*args)
        equation = args[-1]
        if kept is None and compat.has_effect(equation, effect_type):
            return [True] * len(equation.invars), equation
        return used, kept

    on_jaxprs[primitive] = rule
    on_jaxprs[compat.while_p] = loop_rule
    partial_eval.dce_rules[compat.remat_p] = drop_rule


def read_once_when_recomputed(primitive: Primitive, chosen: Callable[[Mapping[str, Any]], bool]) -> None:
    """Has jax.checkpoint save what a primitive without an effect reads, for the parameters for which `chosen` holds.

    Another reading of a clock would take the code that is recomputed another way. With other parameters it reads again.
    """

    def rule(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn) -> Any:
        if not any(unknown) and chosen(equation.params):
            return _run_now(equation)
        _, later, results, _, saved = _run_later(equation, there)
        if any(unknown):
            return None, later, results, results, saved
        return equation, later, [False] * len(results), results, saved

    on_jaxprs[primitive] = rule


_scan_pin_p: Any = Primitive("stay_in_scan")
"""Wraps an equation while JAX looks for equations to move out of a scan."""
_scan_pin_p.multiple_results = True


def _stay_abstract(*avals: Aval, equation: JaxprEqn) -> Any:
    return [var.aval for var in equation.outvars], set(equation.effects)


def _stay_is_high(*avals: Aval, equation: JaxprEqn) -> bool:
    return bool(equation.primitive.is_high(*(var.aval for var in equation.invars), **equation.params))


def _stay_on_tracers(trace: Any, *tracers: Any, equation: JaxprEqn) -> Any:
    # Instantiated operands make the equation unknown. One without operands would be known, so it gets a constant.
    operands = [trace.instantiate_const(t) for t in tracers or (trace.new_const(np.int32(0)),)]
    return trace.default_process_primitive(_scan_pin_p, operands, {"equation": equation})


def _stay_on_jaxprs(saveable: Any, unknown: Sequence[bool], there: Sequence[bool], equation: JaxprEqn) -> Any:
    inner = _unwrap(equation)
    rule = on_jaxprs.get(inner.primitive)
    if rule is None:
        return _run_later(inner, there) if any(unknown) else _run_now(equation)
    known, later, *rest = rule(saveable, unknown, there, inner)
    if known is not None:
        known = known.replace(primitive=_scan_pin_p, params={"equation": known})
    return known, later, *rest


def _unwrap(equation: JaxprEqn) -> Any:
    if equation.primitive is not _scan_pin_p:
        return equation
    inner = equation.params["equation"]
    return inner.replace(invars=equation.invars[: len(inner.invars)], outvars=equation.outvars)


def _with_equations(closed: ClosedJaxpr, change: Callable[[JaxprEqn], Any]) -> Any:
    jaxpr = closed.jaxpr.replace(eqns=[change(equation) for equation in closed.jaxpr.eqns])
    return closed.replace(jaxpr=jaxpr)


def _with_body(scan: JaxprEqn, change: Callable[[JaxprEqn], Any]) -> Any:
    return scan.replace(params={**scan.params, "jaxpr": _with_equations(scan.params["jaxpr"], change)})


def _run_now(equation: JaxprEqn) -> Any:
    # The results are saved, as JAX does for equations with effects and without a rule.
    results = [False] * len(equation.outvars)
    return equation, None, results, results, []


def _run_later(equation: JaxprEqn, there: Sequence[bool]) -> Any:
    results = [True] * len(equation.outvars)
    operands = zip(equation.invars, there, strict=True)
    saved = [var for var, is_there in operands if isinstance(var, compat.Var) and not is_there]
    return None, equation, results, results, saved


_scan_pin_p.def_effectful_abstract_eval(_stay_abstract)
_scan_pin_p.is_high = _stay_is_high
on_tracers[_scan_pin_p] = _stay_on_tracers
on_jaxprs[_scan_pin_p] = _stay_on_jaxprs
