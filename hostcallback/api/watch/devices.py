"""A `shard_map` on one device: the program of all devices at once, with an axis for each axis of the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hostcallback import _jax_compat as compat
from hostcallback.lowering.evaluator import Evaluator, Place, structure_of

Joined = Callable[[Sequence[Any]], list[Any]]


def per_device(equation: Any, operands: Sequence[Any]) -> tuple[Any, list[Any], Joined]:
    """Takes a shard_map apart.

    Args:
        equation: the shard_map.
        operands: its operands, whole.

    Returns:
        The program of its devices as a closed jaxpr, whose values have an axis for each axis of the mesh, the inputs of
        that program, and what makes the results of the equation from its results.
    """
    params = equation.params
    axes, sizes = compat.shard_map_axes(params), compat.mesh_sizes(params)
    split = [_split(x, spec, axes, sizes) for x, spec in zip(operands, params["in_specs"], strict=True)]

    def inside(*values: Any) -> list[Any]:
        return _Devices().evaluate(params["jaxpr"], values, Place())[0]

    mapped: Callable[..., Any] = inside
    for axis, size in reversed(list(zip(axes, sizes, strict=True))):
        mapped = jax.vmap(mapped, in_axes=0, out_axes=0, axis_name=axis, axis_size=size)
    closed = jax.make_jaxpr(mapped)(*split)

    def joined(outs: Sequence[Any]) -> list[Any]:
        return [_joined(x, spec, axes) for x, spec in zip(outs, params["out_specs"], strict=True)]

    return closed, split, joined


class _Devices(Evaluator):
    def enters(self, jaxpr: Any, number: int, equation: Any, place: Place) -> bool:
        structure = structure_of(equation)
        return structure is not None and structure.kind != "other"

    def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
        outs = compat.collective_under_vmap(equation, values)
        return super().bind(equation, values) if outs is None else outs


def _names(spec: Any, ndim: int) -> list[tuple[Any, ...]]:
    # For each dimension the axes of the mesh over which it is divided.
    names = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    return names + [()] * (ndim - len(names))


def _split(x: Any, spec: Any, axes: Sequence[Any], sizes: Sequence[int]) -> Any:
    size_of = dict(zip(axes, sizes, strict=True))
    names, shape, order = _names(spec, jnp.ndim(x)), [], []
    for dimension, parts in zip(jnp.shape(x), names, strict=True):
        shape += [size_of[part] for part in parts]
        order += list(parts)
        shape.append(dimension // functools.reduce(lambda a, b: a * b, (size_of[p] for p in parts), 1))
        order.append(None)
    x = jnp.reshape(x, shape)
    front = [order.index(axis) for axis in axes if axis in order]
    rest = [i for i, axis in enumerate(order) if axis is None]
    x = jnp.transpose(x, [*front, *rest])
    missing = [i for i, axis in enumerate(axes) if axis not in order]
    x = jnp.expand_dims(x, missing)
    return jnp.broadcast_to(x, [*sizes, *x.shape[len(sizes) :]])


def _joined(x: Any, spec: Any, axes: Sequence[Any]) -> Any:
    ndim = x.ndim - len(axes)
    names = _names(spec, ndim)
    used = [name for parts in names for name in parts]
    index = tuple(slice(None) if axis in used else 0 for axis in axes)
    x = x[index]
    left = [axis for axis in axes if axis in used]
    order, shape = [], []
    for number, parts in enumerate(names):
        order += [left.index(part) for part in parts] + [len(left) + number]
        dims = [x.shape[left.index(part)] for part in parts] + [x.shape[len(left) + number]]
        shape.append(functools.reduce(lambda a, b: a * b, dims, 1))
    return jnp.reshape(jnp.transpose(x, order), shape)
