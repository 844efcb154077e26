"""Primitives for loops whose elements under vmap end at different steps: the loop runs until the last one has ended."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from hostcallback import _jax_compat as compat

any_lane_p = Primitive("any_lane")
"""Of a boolean scalar: itself; under vmap: whether it holds for any element, one value for all."""

select_lanes_p = Primitive("select_lanes")
"""Of a boolean scalar and two values of a shape: the second; under vmap: the third where the boolean does not hold."""


def any_lane(holds: Any) -> Any:
    """Whether a boolean scalar holds for any element of the vmaps around it."""
    return any_lane_p.bind(holds)


def select_lanes(holds: Any, new: Any, old: Any) -> Any:
    """Returns the tree `new`, under vmap with the leaves of `old` for elements for which `holds` is false."""
    return jax.tree.map(
        lambda new, old: select_lanes_p.bind(holds, jnp.asarray(new), jnp.asarray(old)), new, old
    )


def _any_batch(args: Any, dims: Any) -> Any:
    (holds,), (dim,) = args, dims
    # Bound again, for a vmap around this one.
    return any_lane_p.bind(jnp.any(holds, axis=dim)), None


def _any_jvp(primals: Any, tangents: Any) -> Any:
    out = any_lane_p.bind(*primals)
    return out, compat.zero_tangent(out)


def _select_batch(args: Any, dims: Any) -> Any:
    holds, new, old = args
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    new, old = (_batch_first(x, d, size) for x, d in zip((new, old), dims[1:], strict=True))
    if dims[0] is None:
        return select_lanes_p.bind(holds, new, old), 0
    holds = jnp.moveaxis(holds, dims[0], 0)
    return jnp.where(holds.reshape(holds.shape + (1,) * (new.ndim - holds.ndim)), new, old), 0


def _batch_first(value: Any, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(value, (size, *value.shape)) if dim is None else jnp.moveaxis(value, dim, 0)


def _select_jvp(primals: Any, tangents: Any) -> Any:
    holds, new, old = primals
    out = select_lanes_p.bind(holds, new, old)
    if all(type(t) is ad.Zero for t in tangents[1:]):
        return out, compat.zero_tangent(out)
    moved, kept = map(ad.instantiate_zeros, tangents[1:])
    return out, select_lanes_p.bind(holds, moved, kept)


any_lane_p.def_abstract_eval(lambda holds: holds)
any_lane_p.def_impl(lambda holds: holds)
ad.primitive_jvps[any_lane_p] = _any_jvp
batching.primitive_batchers[any_lane_p] = _any_batch
compat.register_lowering(any_lane_p, lambda ctx, holds: [holds])
select_lanes_p.def_abstract_eval(lambda holds, new, old: new)
select_lanes_p.def_impl(lambda holds, new, old: new)
ad.primitive_jvps[select_lanes_p] = _select_jvp
batching.primitive_batchers[select_lanes_p] = _select_batch
compat.register_lowering(select_lanes_p, lambda ctx, holds, new, old: [new])
