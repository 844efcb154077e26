"""Programs that send a digest of each operation's result, to find where one of them went wrong or two part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.lowering.evaluator import Evaluator, Place, Records, structure_of
from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.call import call_p
from hostcallback.primitives.tap import tap_p
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.tracing import scopes
from hostcallback.tracing.source_line import first_user_line
from hostcallback.tracing.tap_options import TapOptions

TAP = "capsule operations"
"""Name of the tap of the digests."""

SMALL = ("int2", "int4", "uint2", "uint4", "int1", "uint1")

FIRST = 4
"""Number of elements, the first ones, that a digest has."""

_DEBUGGING = {"debug_callback", "debug_print"}


class Digests(Evaluator):
    """Evaluates a program with digests of the results of its operations. Its taps and prints do nothing.

    A message has the digests of the operations of one jaxpr, or of the part of it before a loop or branch:
    `{"hash": uint32 [n], "stats": float [n, 4 + FIRST], "iterations": [int32 scalar, ...]}`, and the
    keyword argument `operations` with a line for each.
    """

    counts = True

    def __init__(self) -> None:
        self._names: list[str] = []
        self._hashes: list[Any] = []
        self._stats: list[Any] = []

    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        structure = structure_of(equation)
        return structure is not None and structure.kind != "other"

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        name = equation.primitive.name
        if equation.primitive is tap_p:
            return list(values)
        if name in _DEBUGGING or (equation.primitive is call_p and not equation.outvars):
            return []
        return self.compute(equation, values)

    def compute(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an operation of the program."""
        return compat.bind_equation(equation, values)

    def made(
        self, jaxpr: Any, equation: Any, values: Sequence[Any], outs: Sequence[Any], place: Place, records: Records
    ) -> None:  # fmt: skip
        if self.enters(jaxpr, 0, equation, place):
            return
        for out in outs:
            if _is_digestible(out):
                self._names.append(_name_of(equation, place, out))
                self._hashes.append(_hash_of(out))
                self._stats.append(_stats_of(out))

    def ends(self, place: Place) -> None:
        if not self._names:
            return
        sent = {
            "hash": jnp.stack(self._hashes), "stats": jnp.stack(self._stats), "iterations": list(place.iterations),
        }  # fmt: skip
        names = "\n".join(self._names)  # a program is exported with plain keyword arguments only
        self._names, self._hashes, self._stats = [], [], []
        options = TapOptions(TAP, tap_tangents=False, sharding="local")
        bind_tap(
            sent, (), {"operations": names}, Binding(_nothing), identity=("digests", names), options=options
        )


class PromotedDigests(Digests):
    """The same in 64 bits: floating-point and complex values are promoted, also where the program converts them."""

    def evaluate(self, jaxpr: Any, values: Sequence[Any], place: Place) -> tuple[list[Any], Records]:
        outs, records = super().evaluate(jaxpr, [_wide(value) for value in values], place)
        return [_wide(out) for out in outs], records

    def holds(self, jaxpr: Any, values: Sequence[Any]) -> Any:
        # Not `self.evaluate`: its digests would be sent before each iteration.
        return _Conditions().evaluate(jaxpr, values, Place())[0][0]

    def compute(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates an operation in 64 bits if there is one that does; with its own types otherwise."""
        avals = [v.aval for v in equation.outvars]
        wide = [_wide(value) for value in values]
        params = {key: _wide_param(value) for key, value in equation.params.items()}
        try:
            outs = compat.bind_equation(_Bound(equation.primitive, params), wide)
            if all(
                out.shape == aval.shape and out.dtype == promoted_dtype(aval.dtype)
                for out, aval in zip(outs, avals, strict=True)
            ):
                return outs
        except (TypeError, ValueError, NotImplementedError, AttributeError):
            pass  # it takes no such arrays: random bits, kernels, functions of frameworks
        narrow = [_as(value, v.aval) for value, v in zip(values, equation.invars, strict=True)]
        return [_wide(out) for out in compat.bind_equation(equation, narrow)]


class _Conditions(PromotedDigests):
    def made(self, *arguments: Any) -> None:
        return


@dataclasses.dataclass(frozen=True)
class _Bound:
    primitive: Any
    params: dict[str, Any]


def promoted_dtype(dtype: Any) -> Any:
    """The dtype of 64 bits (128 if complex) for a dtype of floating-point or complex numbers; others as they are."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide(value: Any) -> Any:
    aval = jax.typeof(value)
    dtype = getattr(aval, "dtype", None)
    if dtype is None or promoted_dtype(dtype) == dtype:
        return value
    return lax.convert_element_type(value, promoted_dtype(dtype))


def _as(value: Any, aval: Any) -> Any:
    if jax.typeof(value).dtype == aval.dtype:
        return value
    return lax.convert_element_type(value, aval.dtype)


def _wide_param(value: Any) -> Any:
    return promoted_dtype(value) if isinstance(value, np.dtype) else value


def _nothing(value: Any, operations: Any) -> None:
    """Receives digests in the process that wrote the program, which does not run it."""


def _is_digestible(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not np.size(value) or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(np.dtype(dtype).kind in "biufcV")


def _name_of(equation: Any, place: Place, out: Any) -> str:
    lines = (first_user_line(compat.equation_frames(e)) for e in (equation, *reversed(place.equations)))
    line = next((str(line) for line in lines if line is not None), "unknown line")
    stacks = [str(e.source_info.name_stack) for e in (*place.equations, equation)]
    scope = "/".join(part for stack in stacks for part in scopes.scope_of(stack))
    backward = " (backward)" if scopes.is_backward(stacks[-1]) else ""
    text = f"{equation.primitive.name}{backward} {list(np.shape(out))} at {line}"
    return f"{text}, scope {scope}" if scope else text


def _hash_of(value: Any) -> Any:
    # Depends on each bit and on its place. Unsigned sums wrap, so it does not depend on their order.
    value = lax.stop_gradient(value)
    kind = np.dtype(value.dtype).kind
    if kind == "c":
        return _hash_of(jnp.real(value)) + jnp.uint32(3) * _hash_of(jnp.imag(value))
    if kind == "b":
        words = value.astype(jnp.uint32)
    else:
        size = np.dtype(value.dtype).itemsize
        if np.dtype(value.dtype).name in SMALL:
            value, size = value.astype(jnp.int8), 1
        words = lax.bitcast_convert_type(value, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))
        words = words.astype(jnp.uint32)
    words = words.reshape(-1)
    odd = lax.iota(jnp.uint32, words.size) * jnp.uint32(2654435762) + jnp.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _stats_of(value: Any) -> Any:
    # Smallest, largest, mean and root mean square, and the first elements; of complex values the magnitudes.
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    flat = jnp.reshape(jnp.abs(value) if np.dtype(value.dtype).kind == "c" else value, -1)
    flat = lax.stop_gradient(flat).astype(dtype)
    first = jnp.pad(flat[:FIRST], (0, max(0, FIRST - flat.size)))
    stats = jnp.stack([flat.min(), flat.max(), flat.mean(), jnp.sqrt(jnp.mean(flat * flat))])
    return jnp.concatenate([stats, first])
