"""Sends the inputs of a program if a call of it fails: compiled in, behind a branch, without Python in each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback.lowering.xray import Program
from hostcallback.primitives.device_ops import copies, not_finite
from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.messages import Message, Sink
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.tracing.tap_spec import LAST, TapOptions


def run_keeping_inputs(
    program: Program, values: Sequence[jax.Array], run: Callable[[Sequence[Any]], Any]
) -> tuple[Any, list[Any]]:
    """Runs a program in a trace so that its inputs are still there at its end.

    What the program may write over (donated inputs) is copied before, on CPUs by one native call. Returns what `run`
    returns, which gets the values to run on, and the inputs for `send_inputs_if`.
    """
    numbers = [
        i
        for i, donated in enumerate(program.donated)
        if donated and not jnp.issubdtype(values[i].dtype, jax.dtypes.extended)
    ]
    inner, kept = _apart(program, values), list(values)
    if not numbers:
        return run(inner), kept
    through, copied = copies([values[i] for i in numbers])
    for i, value, copy in zip(numbers, through, copied, strict=True):
        inner[i], kept[i] = value, copy
    return run(inner), kept


def _apart(program: Program, values: Sequence[jax.Array]) -> list[jax.Array]:
    # XLA counts the readers of a value: of a quotient by a scalar that nothing else reads it makes a product with the
    # reciprocal, with other last bits. Behind a barrier, what sends the inputs is no other reader. Only there: barriers
    # change what XLA fuses.
    jaxpr = compat.open_jaxpr(program.tapped)[0]
    read = Counter(id(variable) for equation in jaxpr.eqns for variable in equation.invars)
    once = [not v.aval.shape and is_inexact(v.aval) and read[id(v)] == 1 for v in jaxpr.invars]
    return [
        jax.lax.optimization_barrier(value) if is_read_once else value
        for value, is_read_once in zip(values, once, strict=True)
    ]


def any_not_finite(values: Sequence[jax.Array], devices: int = 1) -> jax.Array:
    """Whether any element of any floating-point or complex array among the values is not finite: a bool scalar."""
    return jnp.any(groups_not_finite(values, devices))


def groups_not_finite(values: Sequence[jax.Array], devices: int = 1) -> Any:
    """As `any_not_finite`, per group of arrays with one type: bool [groups]."""
    inexact = [value for value in values if is_inexact(value)]
    if devices > 1:
        # The compiler would divide the arrays of a group alike, and with them results that are whole without the test.
        return not_finite(inexact, range(len(inexact)))
    groups: dict[Any, int] = {}  # arrays of one shape are tested together where no native handler does it
    numbers = [groups.setdefault(jax.typeof(value), len(groups)) for value in inexact]
    return not_finite(inexact, numbers)


def is_inexact(value: jax.Array | compat.Aval) -> bool:
    """Whether a value, or a type of values, can hold NaN."""
    aval = value if isinstance(value, jax.core.AbstractValue) else jax.typeof(value)
    return isinstance(aval, jax.core.ShapedArray) and bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def send_inputs_if(
    failed: jax.Array,
    values: Sequence[jax.Array],
    receive: Callable[[Message], None],
    name: str,
    kind: tap_descriptor.TapKind = tap_descriptor.TAP,
    params: Mapping[str, Any] | None = None,
) -> None:
    """Sends one message with the inputs if the bool scalar `failed` holds.

    Args:
        failed: whether the call failed.
        values: the constants and inputs of the program, as `run_keeping_inputs` returns them.
        receive: called with the message on a receiver thread, before a barrier that waits for it returns; another
            object for each program. The program keeps it alive.
        name: of the tap.
        kind: of the tap; the messages of a check have its predicate, False, before the inputs.
        params: parameters for the sink of that kind, in logs; plain data.
    """
    options = TapOptions(
        name,
        tap_tangents=False,
        processes="all",
        keep_objects=False,
        kind=kind,
        params={**(params or {}), LAST: True},
    )

    def send(values: list[jax.Array]) -> tuple[()]:
        binding = Binding(receive, calls=_with_message)
        values = [jnp.zeros((), bool), *values] if kind.is_check else values
        bind_tap(values, (), {}, binding, identity=(receive,), options=options)
        return ()

    jax.lax.cond(failed, send, lambda values: (), list(values))


def _with_message(func: Callable[..., Any], *_: Any, **options: Any) -> Sink:
    return func
