"""A step that sends a digest of each operation's result, to find where two runs of it part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hostcallback import _jax_compat as compat
from hostcallback.api.nonfinite.operation import scope_of
from hostcallback.api.nonfinite.silence import silently
from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.jaxpr_rewriter import Mark, Place, rewrite
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.tracing.source_line import first_user_line
from hostcallback.tracing.tap_options import TapOptions

TAP = "capsule operations"
"""Name of the tap of the digests."""

SMALL = ("int2", "int4", "uint2", "uint4", "int1", "uint1")

FIRST = 4
"""Number of elements, the first ones, that a digest has."""


def digested(function: Callable[..., list[Any]], arrays: Sequence[Any]) -> list[Any]:
    """Evaluates a function of arrays; sends a digest of the result of each operation. Its taps and prints do nothing.

    A message has the digests of the operations of one jaxpr, or of the part of it before a loop or branch:
    `{"hash": uint32 [n], "stats": float [n, 4 + FIRST], "iterations": [int32 scalar, ...]}`, and the
    keyword argument `operations` with a line for each.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    values = [jnp.asarray(array) for array in arrays]
    return rewrite(closed, _Digests(), values, [False] * len(values), Place())[0]


class _Digests:
    # A visitor of the program; see `jaxpr_rewriter.Visitor`.

    def __init__(self) -> None:
        self._names: list[str] = []
        self._hashes: list[Any] = []
        self._stats: list[Any] = []

    def inner(self) -> _Digests:
        return _Digests()

    def evaluate(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        return silently(equation, values, [])

    def visit(
        self, equation: Any, place: Place, marks: Sequence[Mark], outs: list[Any]
    ) -> tuple[list[Any], list[Mark]]:
        for out in outs:
            if _is_digestible(out):
                self._names.append(_name_of(equation, place, out))
                self._hashes.append(_hash_of(out))
                self._stats.append(_stats_of(out))
        return outs, [False] * len(outs)

    def mark(self, value: Any) -> Mark:
        return False

    def can_mark(self, aval: Any) -> bool:
        return False

    def flush(self, place: Place) -> None:
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
    scope = scope_of([*place.names, str(equation.source_info.name_stack)])
    backward = " (backward)" if "transpose(" in str(equation.source_info.name_stack) else ""
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
    dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
    flat = jnp.reshape(jnp.abs(value) if np.dtype(value.dtype).kind == "c" else value, -1)
    flat = lax.stop_gradient(flat).astype(dtype)
    first = jnp.pad(flat[:FIRST], (0, max(0, FIRST - flat.size)))
    stats = jnp.stack([flat.min(), flat.max(), flat.mean(), jnp.sqrt(jnp.mean(flat * flat))])
    return jnp.concatenate([stats, first])
