"""Shared by tests of programs: ways to run a function, work of a known length, and tap messages as plain values."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import hostcallback as hcb
from recorder import Recorder

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]


def no_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a jit: runs the function eagerly. The fixture `jit` has `jax.jit` and this."""
    return fun


PROGRAM_FAILED = (jax.errors.JaxRuntimeError, ValueError)
"""Errors that the caller of a failed program gets: from JAX's fast dispatch a ValueError("INTERNAL: ...")."""

JVP = ("jvp", {})
TRANSPOSE = ("transpose", {})
PRIMAL: tuple[Any, ...] = ()
TANGENT = (JVP,)
COTANGENT = (JVP, TRANSPOSE)


def batch(*dims: int | None) -> tuple[str, dict[str, Any]]:
    """The entry that `vmap` adds to `transforms`: one dimension for each leaf."""
    return ("batch", {"batch_dims": dims})


def delivered(rec: Recorder, device: Any = None) -> list[tuple[Any, Any]]:
    """Waits for every message; then (transforms, value) of each, of one device if given, in order of delivery.

    Values are plain: numbers rounded to four digits and nested lists of them, and `float0` for such an array.
    """
    hcb.barrier_wait()
    messages = zip(rec.transforms, rec.values, rec.devices, strict=True)
    return [(transforms, plain(value)) for transforms, value, d in messages if device in (None, d)]


def places(rec: Recorder) -> list[tuple[str, Any]]:
    """Waits for every message; then (keyword argument `place`, value) of each."""
    hcb.barrier_wait()
    return [(kwargs["place"], plain(value)) for kwargs, value in zip(rec.kwargs, rec.values, strict=True)]


def plain(tree: Any) -> Any:
    """The pytree with lists and numbers for its arrays."""
    return jax.tree.map(_plain_leaf, tree)


def _plain_leaf(leaf: Any) -> Any:
    array = np.asarray(leaf)
    if array.dtype == jax.dtypes.float0:
        return "float0"
    if array.dtype.kind in "biu":
        return array.tolist()
    return np.round(array.astype(np.float64), 4).tolist()


def elements(*indices: list[int]) -> tuple[str, dict[str, Any]]:
    """The last entry of `transforms` where a vmap batches a predicate: places of the elements that take part."""
    return ("mask", {"elements": indices})


def delivered_parts(rec: Recorder) -> list[tuple[Any, Any]]:
    """As `delivered`, with lists for the places of elements."""

    def plainly(params: dict[str, Any]) -> dict[str, Any]:
        found = params.get("elements")
        return params if found is None else {"elements": tuple(axis.tolist() for axis in found)}

    return [
        (tuple((name, plainly(p)) for name, p in transforms), value) for transforms, value in delivered(rec)
    ]


def nap(x: Any, seconds: Any) -> Any:
    """Returns `x` after some time, in the program."""

    def sleep(x: Any, seconds: Any) -> Any:
        end = time.perf_counter() + float(seconds)
        while time.perf_counter() < end:
            pass
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x, seconds)
