"""Mesh axes that shard_map takes over from the compiler, and the values that vary over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax._src import (
    core as _core,  # ShapedArray, ManualAxisType, get_cur_mesh_sharding
    shard_map as _shard_map,  # shard_map_p
)

from hostcallback._jax_compat import versions


def in_manual_region() -> bool:
    """Whether the calling thread traces the body of a shard_map."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def in_partially_manual_region() -> bool:
    """Whether the calling thread traces the body of a shard_map that leaves some axes to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and not mesh.are_all_axes_manual


shard_map_p: Any = _shard_map.shard_map_p


def shard_map_axes(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that a shard_map takes over, in the order of its mesh; the parameter is `manual_axes` until 0.9."""
    manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    return tuple(axis for axis in params["mesh"].axis_names if axis in manual)


def mesh_sizes(params: dict[str, Any]) -> tuple[int, ...]:
    """The sizes of the axes that `shard_map_axes` names."""
    return tuple(int(params["mesh"].shape[axis]) for axis in shard_map_axes(params))


def mesh_device(params: dict[str, Any], index: Sequence[int]) -> str:
    """The name of the device at an index of the axes that `shard_map_axes` names; empty if it is not known."""
    devices = getattr(params["mesh"], "devices", None)
    if devices is None or params["mesh"].axis_names != shard_map_axes(params):
        return ""
    device = devices[tuple(index)]
    return f"{device.platform}:{device.id}"


def collective_under_vmap(equation: Any, values: Sequence[Any]) -> list[Any] | None:
    """The results of an equation of a shard_map's body where vmap stands for the devices; None for most equations.

    These primitives (0.9 to 0.12) look at the types of values in a shard_map, which they do not have under vmap.
    """
    name, params = equation.primitive.name, equation.params
    if name in ("psum_invariant", "psum"):
        return [jax.lax.psum(value, params["axes"]) for value in values]
    if name in ("pvary", "pcast"):
        return list(values)
    return None


def varying_axes(avals: Iterable[Any]) -> frozenset[Any]:
    """The manual mesh axes over which any of the avals varies; see `results_that_vary_as`."""
    axes: frozenset[Any] = frozenset()
    arrays: list[Any] = [aval for aval in avals if isinstance(aval, _core.ShapedArray)]
    for aval in arrays:
        axes |= aval.mat.varying if versions.HAS_MANUAL_AXIS_TYPE else aval.vma
    return axes


def vary_over(axes: frozenset[Any], value: Any) -> Any:
    """The value as one that varies over those axes as well: the two results of a branch, say, must agree in that."""
    missing = tuple(sorted(axes - varying_axes([jax.typeof(value)]), key=str))
    if not missing:
        return value
    lax: Any = jax.lax  # which has pcast from 0.9 on, where pvary is deprecated
    return lax.pcast(value, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(value, missing)


def results_that_vary_as(avals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The avals of results that depend on all operands: they vary over every manual mesh axis that one of those does.

    JAX's own rule for its callbacks and FFI calls leaves the axes out, or demands that all operands agree (0.8 to
    0.12): without this one, shard_map refuses the result of a call or the call itself.
    """
    varying = varying_axes(avals)
    sharding = _core.get_cur_mesh_sharding()
    if not varying:
        return [result.update(sharding=sharding) for result in results]
    if versions.HAS_MANUAL_AXIS_TYPE:
        axes: dict[str, Any] = {"manual_axis_type": _core.ManualAxisType(varying=varying)}
    else:
        axes = {"vma": varying}
    return [result.update(sharding=sharding, **axes) for result in results]
