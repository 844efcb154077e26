"""Lowers checks that follow each other as one: one native call tests their predicates, behind one branch they emit.

Each operation of a program costs XLA:CPU one or two microseconds, and a check is three: two reductions and a branch. So
checks of a program between which there is nothing but cheap equations (no loop, matrix product, effect) become one
equation. Its call reads the array behind a predicate `isfinite(x).all()` or `p.all()` itself. If all hold, that is
all; else each check emits as it does alone, in order, and the handler of each decides.

Only on the native transport of CPUs, and where the compiler partitions nothing: elsewhere each check is lowered alone.
Large operands are left alone: the group comes behind its last check, until which they could not be written over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import Aval, IrValue, Jaxpr, JaxprEqn, Literal, Var
from hostcallback.lifecycle import receivers as transport
from hostcallback.lowering import device_ops, emission
from hostcallback.lowering.equations import CALLS, variables
from hostcallback.primitives import effects
from hostcallback.primitives.effects import TAP_EFFECT, TapEffect
from hostcallback.primitives.tap import tap_p
from hostcallback.tracing.tap_spec import LAST

MAX_CHECKS = 32
"""Checks of one group: XLA's time to compile a branch grows faster than what is in it."""

MAX_BYTES = 1 << 18
"""Size up to which an array waits for the others of its group."""

_CHEAP = frozenset((
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "div", "dynamic_slice", "eq", "exp", "expand_dims", "floor", "gather", "ge", "gt", "imag", "integer_pow", "iota",
    "is_finite", "le", "log", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "real", "reduce_and",
    "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "rem", "reshape", "round", "rsqrt", "select_n",
    "sign", "slice", "sqrt", "square", "squeeze", "sub", "transpose", "xor",
))  # fmt: skip


class _Check(NamedTuple):
    """One check of a group.

    Attributes:
        params: of its equation.
        arity: the number of its operands.
        reduced: whether its first operand is an array in place of the predicate, which holds if all elements do: those
            of numbers if they are finite.
    """

    params: dict[str, Any]
    arity: int
    reduced: bool


@dataclass(frozen=True, eq=False)
class _Group:
    """The parameter of an equation, hashed by its identity."""

    checks: Sequence[_Check]


checks_p = compat.Primitive("checks")
"""Checks in a row: it has their operands and no results. Never bound by users' traces, only lowered."""
checks_p.multiple_results = True


def grouped(context: compat.LoweringContext, closed: compat.ClosedJaxpr) -> compat.ClosedJaxpr:
    """Returns a program that is about to be lowered in `context`, with its checks grouped, also those in its loops."""
    alone = context.automatic or context.for_export or tuple(context.platforms) != ("cpu",)
    if alone or not transport.use_native("cpu"):
        return closed
    changed: compat.ClosedJaxpr = _Grouping().program(closed)
    return changed


class _Grouping:
    """One pass over a program. A program that several equations hold is changed once, and so lowered once."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by id, which the first of the two keeps

    def program(self, closed: compat.ClosedJaxpr) -> Any:
        if not compat.has_effect(closed, TapEffect):
            return closed
        if id(closed) not in self._done:
            jaxpr = self._grouped(closed.jaxpr)
            changed = closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)
            self._done[id(closed)] = (closed, changed)
        return self._done[id(closed)][1]

    def _grouped(self, jaxpr: Jaxpr) -> Any:
        equations = [self._inside(equation) for equation in jaxpr.eqns]
        found = list(_groups(equations, jaxpr))
        if not found and all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
            return jaxpr
        made_by = {result: equation for equation in equations for result in equation.outvars}
        removed: set[int] = set()
        for members in found:
            equations[members[-1]] = _merged([equations[number] for number in members], made_by)
            removed.update(members[:-1])
        return jaxpr.replace(eqns=[each for number, each in enumerate(equations) if number not in removed])

    def _inside(self, equation: JaxprEqn) -> JaxprEqn:
        params, name = equation.params, equation.primitive.name
        keys = {"scan": "jaxpr", "while": "body_jaxpr", "jit": "jaxpr", "pjit": "jaxpr", "cond": "branches"}
        if name not in keys or not compat.has_effect(equation, TapEffect):
            return equation
        old: Any = params[keys[name]]
        new = tuple(map(self.program, old)) if name == "cond" else self.program(old)
        is_same = all(a is b for a, b in zip(new, old, strict=True)) if name == "cond" else new is old
        return equation if is_same else equation.replace(params={**params, keys[name]: new})


def _groups(equations: Sequence[JaxprEqn], jaxpr: Jaxpr) -> Any:
    # Yields the numbers of checks that form a group.
    if sum(equation.primitive is tap_p for equation in equations) < 2:
        return
    used = {atom for equation in equations for atom in variables(equation.invars)}
    used.update(variables(jaxpr.outvars))
    members: list[int] = []
    for number, equation in enumerate(equations):
        joins = _joins(equation, used)
        if joins:
            members.append(number)
        if len(members) == MAX_CHECKS or not (joins or _is_cheap(equation)):
            if len(members) > 1:
                yield members
            members = []
    if len(members) > 1:
        yield members


def _joins(equation: JaxprEqn, used: set[Var]) -> bool:
    if equation.primitive is not tap_p:
        return False
    tap = equation.params["tap"]
    # Checks of a watched program stand together already; its inputs are sent behind them.
    is_plain = tap.options.kind.is_check and tap.options.ordered and tap.origin is None
    if not is_plain or LAST in tap.options.params or used.intersection(equation.outvars):
        return False
    return all(_nbytes(atom.aval) <= MAX_BYTES for atom in equation.invars)


def _nbytes(aval: Aval) -> float:
    try:
        return float(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)
    except TypeError:  # a type of JAX's own, such as a key
        return math.inf


def _is_cheap(equation: JaxprEqn) -> bool:
    if equation.effects:
        return False
    if equation.primitive.name in CALLS:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        return inner is not None and all(map(_is_cheap, compat.open_jaxpr(inner)[0].eqns))
    return equation.primitive.name in _CHEAP


def _merged(checks: Sequence[JaxprEqn], made_by: dict[Var, JaxprEqn]) -> Any:
    # In place of the last one, whose source line XLA then knows for all.
    operands: list[Any] = []
    members: list[_Check] = []
    for check in checks:
        array = _reduced_by(check.invars[0], made_by)
        operands += [check.invars[0] if array is None else array, *check.invars[1:]]
        members.append(_Check(check.params, len(check.invars), array is not None))
    params = {"group": _Group(members)}
    return checks[-1].replace(primitive=checks_p, invars=operands, outvars=[], params=params)


def _reduced_by(predicate: Any, made_by: dict[Var, JaxprEqn]) -> Var | None:
    # The array whose elements decide about a scalar predicate, where the native test of it takes less than XLA's.
    if isinstance(predicate, Literal) or predicate.aval.shape:
        return None
    array = _operand_of(predicate, "reduce_and", made_by) or predicate
    numbers = _operand_of(array, "is_finite", made_by)
    if numbers is not None and compat.aval_of(numbers).dtype.name in device_ops.NATIVE_DTYPES:
        array = numbers
    return array if array is not predicate and _nbytes(array.aval) <= MAX_BYTES else None


def _operand_of(result: Var, name: str, made_by: dict[Var, JaxprEqn]) -> Var | None:
    # The operand, if an equation of that name made the result.
    equation = made_by.get(result)
    if equation is None or equation.primitive.name != name or isinstance(equation.invars[0], Literal):
        return None
    operand: Var = equation.invars[0]
    return operand


def _lower(ctx: compat.LoweringRuleContext, *operands: IrValue, group: _Group) -> Sequence[IrValue]:
    context, checks = compat.LoweringContext(ctx), group.checks
    starts = list(itertools.accumulate((check.arity for check in checks), initial=0))
    failed = device_ops.tests(context, [operands[start] for start in starts[:-1]])
    token = context.token_in(TAP_EFFECT)

    def emit() -> IrValue:
        last = token
        for number, (check, (start, end)) in enumerate(zip(checks, itertools.pairwise(starts), strict=True)):
            arrays, avals = list(operands[start:end]), list(ctx.avals_in[start:end])
            if check.reduced:
                # Inside the branch, so that no predicate is computed while all hold.
                element, avals[0] = compat.element(failed, number)
                arrays[0] = context.negated(element)
            last = emission.prepare(context, arrays, avals, **check.params)[0](last)
        return last

    has_branch = context.kept_alive < emission.MAX_BRANCHES * len(checks)
    token_out = context.unless(context.negated(failed), token, emit) if has_branch else emit()
    context.set_token_out(TAP_EFFECT, token_out)
    return []


def _abstract(*avals: Aval, group: _Group) -> tuple[list[Aval], set[TapEffect]]:
    return [], {effects.TAP_EFFECT, effects.PASSED_TOKEN_EFFECT}


checks_p.def_effectful_abstract_eval(_abstract)
compat.register_lowering(checks_p, _lower)
effects.group_checks = grouped
