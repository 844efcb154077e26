"""Evaluates a program with its plan, and carries what was measured out of loops, branches and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    scan_p,
    while_p,
)
from jax.sharding import PartitionSpec

from hostcallback import _jax_compat as compat
from hostcallback.api.observe.plan import Plan
from hostcallback.api.observe.report import send_cotangent
from hostcallback.primitives.jaxpr_rewriter import jit_like

Records = dict[str, Any]
"""What was measured, by label."""

Rule = Callable[..., tuple[list[Any], Records]]


class Collector:
    """Evaluates a program, and measures the values of a plan.

    `measure` gets a value and returns what to keep of it. `send` gets the records of one iteration of a `while_loop`,
    whose number of iterations is not known, so that they cannot be returned. Of the values with labels in `outer`, the
    cotangents are sent, if code around the function differentiates it.
    """

    def __init__(
        self,
        measure: Callable[[Any], Any],
        send: Callable[[Records], None],
        outer: Set[str] = frozenset(),
    ) -> None:
        self._measure = measure
        self._send = send
        self._outer = outer

    def evaluate(self, jaxpr: Any, plan: Plan, values: Sequence[Any]) -> tuple[list[Any], Records]:
        """Evaluates a jaxpr, closed or without constants; returns its results and the records."""
        jaxpr, consts = compat.open_jaxpr(jaxpr)
        env: dict[Any, Any] = {}
        records: Records = {}

        def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
            for variable, value in zip(variables, values, strict=True):
                for label in plan.taps.get(variable, ()):
                    value = self._tapped(value, label, records)
                env[variable] = value

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        write(jaxpr.constvars, consts)
        write(jaxpr.invars, values)
        for number, equation in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in equation.invars]
            with compat.equation_context(equation):
                if number in plan.inside:
                    outs, inner = self._rule_of(equation)(self, equation, plan.inside[number], operands)
                    records.update(inner)
                else:
                    outs = compat.bind_equation(equation, operands)
            write(equation.outvars, outs)
        return [read(atom) for atom in jaxpr.outvars], records

    @staticmethod
    def _rule_of(equation: Any) -> Rule:
        return _RULES.get(equation.primitive, Collector.call)

    def _tapped(self, value: Any, label: str, records: Records) -> Any:
        if label in self._outer:
            return send_cotangent(value, lambda ct: self._send({label: self._measure(ct)}))
        records[label] = self._measure(value)
        return value

    def call(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        """A call that XLA inlines anyway."""
        params = equation.params
        return self.evaluate(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"], plans[0], values)

    def jit(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        params = equation.params

        def inside(*values: Any) -> tuple[list[Any], Records]:
            return self.evaluate(params["jaxpr"], plans[0], values)

        return jit_like(params, inside)(*values)

    def cond(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        pairs = list(zip(equation.params["branches"], plans, strict=True))
        axes = compat.varying_axes(v.aval for v in (*equation.invars, *equation.outvars))
        shapes: Records = {}
        for branch, plan in pairs:
            evaluate = functools.partial(self.evaluate, branch, plan)
            shapes.update(jax.eval_shape(lambda *xs, evaluate=evaluate: evaluate(xs)[1], *values[1:]))

        def inside(branch: Any, plan: Plan, *values: Any) -> Any:
            outs, records = self.evaluate(branch, plan, values)
            nothing = {k: jax.tree.map(_nothing, shape) for k, shape in shapes.items() if k not in records}
            return outs, jax.tree.map(lambda value: compat.vary_over(axes, value), {**nothing, **records})

        branches = [functools.partial(inside, *pair) for pair in pairs]
        outs, records = jax.lax.switch(jnp.asarray(values[0], jnp.int32), branches, *values[1:])
        return outs, records

    def remat(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        params = dict(equation.params)
        jaxpr, tree = params.pop("jaxpr"), None

        def inside(*values: Any) -> Any:
            nonlocal tree
            outs, records = self.evaluate(jaxpr, plans[0], values)
            leaves, tree = jax.tree.flatten(records)
            return [*outs, *leaves]

        # Binds the primitive, because jax.checkpoint has no argument that says whether this is already a backward pass.
        closed, consts = compat.constants_to_inputs(jax.make_jaxpr(inside)(*values))
        outs = compat.remat_p.bind(*consts, *values, jaxpr=compat.open_jaxpr(closed)[0], **params)
        count = len(equation.outvars)
        return list(outs[:count]), jax.tree.unflatten(tree, outs[count:])

    def shard_map(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        params = equation.params
        axes = compat.shard_map_axes(params)
        varying = frozenset(axes) if params["check_vma"] else frozenset()

        def inside(*values: Any) -> Any:
            outs, records = self.evaluate(params["jaxpr"], plans[0], values)
            # Each device returns its own records along a new axis.
            return outs, jax.tree.map(
                lambda value: compat.vary_over(varying, jnp.asarray(value))[None], records
            )

        outs, records = jax.shard_map(
            inside,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            axis_names=set(axes),
            check_vma=params["check_vma"],
        )(*values)
        return outs, records

    def scan(self, equation: Any, plans: list[Plan], values: Sequence[Any]) -> tuple[list[Any], Records]:
        params = equation.params
        consts, init, xs = compat.scan_groups(params, values)

        def step(carry: Any, x: Any) -> Any:
            outs, records = self.evaluate(params["jaxpr"], plans[0], [*consts, *carry, *x])
            return outs[: len(init)], (outs[len(init) :], records)

        options = {"_split_transpose": True} if params.get("_split_transpose") else {}
        carry, (ys, records) = jax.lax.scan(
            step,
            init,
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            **options,
        )
        return [*carry, *ys], records

    def while_loop(
        self, equation: Any, plans: list[Plan], values: Sequence[Any]
    ) -> tuple[list[Any], Records]:
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def condition(carry: Any) -> Any:
            closed = params["cond_jaxpr"]
            return compat.eval_jaxpr(closed, *values[:first], *carry)[0]

        def body(carry: Any) -> Any:
            outs, records = self.evaluate(params["body_jaxpr"], plans[0], [*values[first:second], *carry])
            if records:
                self._send(records)
            return outs

        return list(jax.lax.while_loop(condition, body, list(values[second:]))), {}

    def custom_jvp(
        self, equation: Any, plans: list[Plan], values: Sequence[Any]
    ) -> tuple[list[Any], Records]:
        observed: jax.custom_jvp[Any] = jax.custom_jvp(self._primal(equation, plans))

        @observed.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            # The user's rule runs as it is. XLA removes what is computed twice.
            outs, out_tangents = jax.jvp(_original(equation), primals, tangents)
            records = self._primal(equation, plans)(*primals)[1]
            return (outs, records), (out_tangents, jax.tree.map(_no_tangent, records))

        outs, records = observed(*values)
        return outs, records

    def custom_vjp(
        self, equation: Any, plans: list[Plan], values: Sequence[Any]
    ) -> tuple[list[Any], Records]:
        observed: jax.custom_vjp[Any] = jax.custom_vjp(self._primal(equation, plans))

        def forward(*values: Any) -> Any:
            outs, pullback = jax.vjp(_original(equation), *values)
            return (outs, self._primal(equation, plans)(*values)[1]), pullback

        def backward(pullback: Any, cotangents: Any) -> Any:
            return tuple(None if _is_float0(ct) else ct for ct in pullback(cotangents[0]))

        observed.defvjp(forward, backward)
        outs, records = observed(*values)
        return outs, records

    def _primal(self, equation: Any, plans: list[Plan]) -> Callable[..., Any]:
        def primal(*values: Any) -> Any:
            params = equation.params
            return self.evaluate(params["call_jaxpr"], plans[0], values)

        return primal


def _original(equation: Any) -> Callable[..., list[Any]]:
    return lambda *values: compat.bind_equation(equation, values)


def _is_float0(value: Any) -> bool:
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


def _no_tangent(value: Any) -> Any:
    is_inexact = jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.zeros_like(value) if is_inexact else np.zeros(value.shape, jax.dtypes.float0)


def _nothing(shape: Any) -> Any:
    return jnp.full(shape.shape, jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


_RULES: dict[Any, Rule] = {
    jit_p: Collector.jit,
    cond_p: Collector.cond,
    compat.remat_p: Collector.remat,
    compat.shard_map_p: Collector.shard_map,
    scan_p: Collector.scan,
    while_p: Collector.while_loop,
    custom_jvp_call_p: Collector.custom_jvp,
    custom_vjp_call_p: Collector.custom_vjp,
}
