"""Keeps what it takes to run one of the last calls of a step again.

A training step gets what the step before it returned. So the arguments of one call in many are kept whole, and of the
calls after it only what they got from elsewhere: the rest is made again by running those calls again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import NoneType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat

CALLS = 16
"""Number of calls of a row: at most these are run again, to make the arguments of a later one."""

MORE_CALLS = 64
"""Number of calls of a row if the arguments that are kept whole are small."""

SMALL_BYTES = 1 << 20
"""What calls got from elsewhere may have this many bytes, or as many as the arguments that are kept whole."""


class TakenError(Exception):
    """Another program has taken a kept argument (`donate_argnums`)."""


class Result(NamedTuple):
    """An argument that is a result of the call before.

    Attributes:
        number: of the result, among several.
    """

    number: int


Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, or the `Result` that each is, and keyword arguments."""


@dataclass(slots=True, eq=False)
class Row:
    """Calls each of which got results of the one before; the arguments of the first are whole.

    Attributes:
        inputs: of the calls, in order.
        nbytes: of what the calls after the first got from elsewhere.
    """

    inputs: list[Inputs] = field(default_factory=list)
    nbytes: int = 0


class Call(NamedTuple):
    """One call of the step.

    Attributes:
        number: of the call, from 0.
        row: the calls that must run again before it can.
        place: of the call in its row.
    """

    number: int
    row: Row
    place: int


class KeptCalls:
    """Makes `Call`s, and their arguments again. A call is kept as long as there is a reference to it. Not thread-safe.

    Attributes:
        first_bytes: bytes of the arguments of the first call.
    """

    def __init__(self, donate_argnums: Sequence[int], donate_argnames: Sequence[str]) -> None:
        """Keeps nothing yet.

        Args:
            donate_argnums: numbers of the positional arguments whose memory the step takes, so that copies are kept.
            donate_argnames: names of its keyword arguments of that kind.
        """
        self._donate_argnums = frozenset(donate_argnums)
        self._donate_argnames = frozenset(donate_argnames)
        self._row: Row | None = None
        self.first_bytes = 0
        self._results: tuple[Any, ...] = ()  # of the last call
        self._indices: dict[int, int] = {}  # by the identity of a result, its number
        self._mutable: set[int] = set()  # numbers of the results with containers that their owner may change
        self._leaves: dict[int, list[Any]] = {}  # by the number of such a result, its leaves

    def note_results(self, results: Any) -> None:
        """Looks at the types of the step's results; called while the step is traced."""
        for index, result in enumerate(_elements(results)):
            if not _is_immutable(jax.tree.structure(result)):
                self._mutable.add(index)

    def goes_on(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments gets results of the last one, which can be made again."""
        row = self._row
        calls = CALLS if self.first_bytes > SMALL_BYTES else MORE_CALLS
        if row is None or len(row.inputs) >= calls or row.nbytes > max(SMALL_BYTES, self.first_bytes):
            return False
        return any(self._index_of(arg) is not None for arg in args)

    def begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, goes_on: bool
    ) -> tuple[Inputs, tuple[Any, ...], dict[str, Any]]:
        """Returns what to keep of a call, and the arguments with which to run it.

        NumPy arrays are copied, because their owner may fill them again.
        """
        to_keep, to_run = [], []
        for position, arg in enumerate(args):
            index = self._index_of(arg)
            if goes_on and index is not None:
                to_keep.append(Result(index))
                to_run.append(arg)
                continue
            # To flatten a model can take longer than the rest of a call.
            own = owned(arg) if index is None or index in self._leaves else arg
            to_run.append(own)
            to_keep.append(_copy(own) if position in self._donate_argnums else own)
        kwargs = {name: owned(value) for name, value in kwargs.items()} if kwargs else kwargs
        return (tuple(to_keep), self._copied(kwargs)), tuple(to_run), kwargs

    def end(self, number: int, inputs: Inputs, out: Any, *, goes_on: bool) -> Call:
        """Keeps a call that has run and returned `out`."""
        if goes_on and self._row is not None:
            row = self._row
            row.nbytes += nbytes_of(inputs)
        else:
            row = self._row = Row()
            self.first_bytes = self.first_bytes or nbytes_of(inputs)
        row.inputs.append(inputs)
        self._results = results = _elements(out)
        self._indices = {id(result): index for index, result in enumerate(results)}
        if self._mutable:
            self._leaves = {i: jax.tree.leaves(results[i]) for i in self._mutable if i < len(results)}
        return Call(number, row, len(row.inputs) - 1)

    def forget(self) -> None:
        """Refers to no call any longer; the next one is kept whole."""
        self._row, self._results, self._indices, self._leaves = None, (), {}, {}

    def arguments(self, call: Call, run: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the arguments of a call again.

        Args:
            call: a call that has run.
            run: runs the step, and returns its results. It may take the memory of the arguments that the step takes.

        Raises:
            TakenError: another program has taken an argument.
        """
        results: tuple[Any, ...] = ()
        inputs = call.row.inputs[: call.place + 1]
        if _is_taken(inputs):
            raise TakenError
        for kept, kwargs in inputs[:-1]:
            args = _made(kept, results)
            for position in self._donate_argnums:
                if position < len(args) and type(kept[position]) is not Result:
                    args[position] = _copy(args[position])
            results = _elements(run(*args, **self._copied(kwargs)))
        kept, kwargs = inputs[-1]
        return tuple(_made(kept, results)), kwargs

    def _copied(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self._donate_argnames.isdisjoint(kwargs):
            return kwargs
        return {
            name: _copy(value) if name in self._donate_argnames else value for name, value in kwargs.items()
        }

    def _index_of(self, arg: Any) -> int | None:
        index = self._indices.get(id(arg))
        if index is not None and index in self._leaves:
            leaves = jax.tree.leaves(arg)
            known = self._leaves[index]
            if len(leaves) != len(known) or not all(map(is_, leaves, known)):
                return None
        return index


def owned(tree: Any) -> Any:
    """What its owner cannot change: NumPy arrays are copied, dicts and lists are copied."""
    if type(tree) is compat.ArrayImpl:
        return tree
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    has_numpy = any(type(leaf) is np.ndarray for leaf in leaves)
    if not has_numpy and _is_immutable(structure):
        return tree
    return structure.unflatten(jnp.array(leaf) if type(leaf) is np.ndarray else leaf for leaf in leaves)


def nbytes_of(inputs: Inputs) -> int:
    """Bytes of the arrays that are kept for a call."""
    args, kwargs = inputs
    kept = [arg for arg in args if type(arg) is not Result]
    return (
        sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves((kept, kwargs))) if kept or kwargs else 0
    )


def _made(args: Sequence[Any], results: tuple[Any, ...]) -> list[Any]:
    return [results[arg.number] if type(arg) is Result else arg for arg in args]


def _elements(results: Any) -> tuple[Any, ...]:
    return tuple(results) if type(results) in (tuple, list) else (results,)


@functools.lru_cache(maxsize=256)
def _is_immutable(structure: Any) -> bool:
    # Frozen dataclasses and modules of equinox refuse assignments to attributes by a __setattr__ of their own; so do
    # containers that are not frozen, but those take items.
    data = structure.node_data()
    if data is not None:
        kind = data[0]
        is_frozen = kind.__setattr__ is not object.__setattr__ and not hasattr(kind, "__setitem__")
        if not (issubclass(kind, tuple | NoneType) or is_frozen):
            return False
    return all(map(_is_immutable, structure.children()))


@jax.jit
def _copy_arrays(arrays: Any) -> Any:
    return [jnp.copy(array) for array in arrays]


def _copy(tree: Any) -> Any:
    """Copies the arrays of a tree to other memory of the same devices."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(len(array.sharding.device_set) > 1 for array in arrays):
        shardings = [array.sharding for array in arrays]
        copies = iter(jax.device_put(arrays, shardings, may_alias=False))
    else:
        copies = iter(_copy_arrays(arrays))
    return structure.unflatten(next(copies) if isinstance(leaf, jax.Array) else leaf for leaf in leaves)


def _is_taken(tree: Any) -> bool:
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))
