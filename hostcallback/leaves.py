"""A tapped pytree taken apart into what goes to the device and what stays on the host."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hostcallback.fingerprint import describe_structure
from hostcallback.tap_spec import Absent
from receiver.dtypes import wire_type_of

_ABSENT = object()
_LEAF = jax.tree.structure(0)


class Structure:
    """How to put a tapped pytree together again from its arrays.

    Static leaves (functions, strings) never leave the host and come back in their place.
    """

    __slots__ = ("_static", "tree")

    def __init__(self, tree: Any, static: Sequence[tuple[int, Any]]) -> None:
        """`tree` is the pytree's structure, `static` its (leaf index, value) pairs that are no arrays."""
        self.tree = tree
        self._static = tuple(static)

    @property
    def static_values(self) -> tuple[Any, ...]:
        """The static leaves, in order."""
        return tuple(value for _, value in self._static)

    def __eq__(self, other: object) -> bool:
        """Whether the trees are equal; static values are compared by the tap's fingerprint."""
        return isinstance(other, Structure) and (self.tree, self._places()) == (other.tree, other._places())

    def __hash__(self) -> int:
        """Agrees with `__eq__`."""
        return hash((self.tree, self._places()))

    def __str__(self) -> str:
        """Equal in every process."""
        return f"{describe_structure(self.tree)} static at {self._places()}"

    def _places(self) -> tuple[int, ...]:
        return tuple(index for index, _ in self._static)

    def unflatten_with(self, absent: Absent) -> Any:
        """The function from delivered arrays to the pytree; `absent` leaves are float0 zeros."""
        fixed: dict[int, Any] = dict(self._static)
        # `absent` counts positions among the arrays only.
        places = [i for i in range(self.tree.num_leaves) if i not in fixed]
        for position, shape in absent:
            fixed[places[position]] = np.zeros(shape, jax.dtypes.float0)
        unflatten = self.tree.unflatten
        if self.tree == _LEAF and not fixed:
            return operator.itemgetter(0)
        if not fixed and self.tree.num_leaves:
            return unflatten
        template = [fixed.get(i, _ABSENT) for i in range(self.tree.num_leaves)]

        def fill(arrays: Sequence[Any]) -> Any:
            rest = iter(arrays)
            return unflatten([next(rest) if leaf is _ABSENT else leaf for leaf in template])

        return fill


def take_apart(value: Any, what: str) -> tuple[list[Any], Structure]:
    """Splits a pytree into its arrays and the structure that puts them back.

    Raises:
        TypeError: a leaf is neither an array nor one of the static kinds; says which and the cure.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(value)
    arrays: list[Any] = []
    static: list[tuple[int, Any]] = []
    for index, (path, leaf) in enumerate(leaves):
        if _is_array(leaf, lambda path=path: what + jax.tree_util.keystr(path)):
            arrays.append(leaf)
        elif callable(leaf) or isinstance(leaf, str | bytes | np.dtype):
            static.append((index, leaf))
        else:
            raise TypeError(
                f"{what}{jax.tree_util.keystr(path)} is a {type(leaf).__module__}.{type(leaf).__qualname__}, "
                "which JAX cannot trace: a tap takes a pytree of arrays and numbers (functions and strings in it "
                "stay on the host); pass other Python objects as keyword arguments of the tap"
            )
    # An equation needs an operand: without one JAX takes it for a constant. `unflatten_with` passes it over.
    return arrays or [np.zeros(0, np.uint8)], Structure(tree, static)


def _is_array(leaf: Any, describe: Any) -> bool:
    if isinstance(leaf, bool | int | float | complex | jax.Array | jax.core.Tracer):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            raise TypeError(
                f"{describe()} has dtype {dtype}, which has no bytes to send: tap jax.random.key_data(key)"
            )
        return True
    if hasattr(leaf, "__jax_array__"):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        try:
            wire_type_of(leaf.dtype)
        except TypeError as error:
            raise TypeError(
                f"{describe()} is a numpy array of dtype {leaf.dtype}, which JAX cannot put on a device: convert it "
                "to a numeric dtype, or pass it as a keyword argument of the tap, which stays on the host"
            ) from error
        return True
    return False
