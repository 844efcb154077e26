"""Splits a tapped pytree into leaves for the device and leaves that stay on the host."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.receiver.wire import pytree as tree
from hostcallback.receiver.wire.frame_layout import wire_type_of
from hostcallback.receiver.wire.truncation import TruncatedArray
from hostcallback.tracing.retention import describe_structure
from hostcallback.tracing.tap_spec import Float0Leaves

_ABSENT = object()
_LEAF = jax.tree.structure(0)
_NUMBERS = (bool, int, float, complex)


class KeyLeaf(NamedTuple):
    """A typed PRNG key among the leaves. It is sent as its data, `uint32` with additional trailing dimensions.

    Attributes:
        leaf: its index among the leaves.
        impl: the key's implementation, the result of `jax.random.key_impl`.
        data_ndim: number of additional dimensions of the data.
    """

    leaf: int
    impl: Any
    data_ndim: int


class TreeTemplate:
    """Restores a tapped pytree from its arrays.

    Static leaves (functions, strings and other objects that are not arrays) stay on the host, and `restore` inserts
    them at their indices.
    """

    __slots__ = ("_keys", "_static", "tree")

    def __init__(self, tree: Any, static: Sequence[tuple[int, Any]], keys: Sequence[KeyLeaf] = ()) -> None:
        """Takes the pytree's structure, the (leaf index, value) pairs of its static leaves, and its typed keys."""
        self.tree = tree
        self._static = tuple(static)
        self._keys = tuple(keys)

    @property
    def static_values(self) -> tuple[Any, ...]:
        """The static leaves, in order."""
        return tuple(value for _, value in self._static)

    @property
    def has_arrays(self) -> bool:
        """Whether any leaf goes to the device."""
        return bool(self.tree.num_leaves > len(self._static))

    @property
    def has_addresses(self) -> bool:
        """Whether a pytree node has static data whose text is an address, such as a static field with a function."""
        return describe_structure(self.tree) != str(self.tree)

    def __eq__(self, other: object) -> bool:
        """Whether the trees are equal; static values are compared by the tap's fingerprint."""
        # No isinstance: specs are compared also while the interpreter shuts down, when the module's names are None.
        return type(other) is type(self) and (self.tree, self._places()) == (other.tree, other._places())

    def __hash__(self) -> int:
        """Agrees with `__eq__`."""
        return hash((self.tree, self._places()))

    def __str__(self) -> str:
        """Returns a text that is equal in every process."""
        static, keys = self._places()
        described = f"{describe_structure(self.tree)} static at {static}"
        return f"{described} keys {[(key.leaf, str(key.impl)) for key in keys]}" if keys else described

    def _places(self) -> tuple[tuple[int, ...], tuple[KeyLeaf, ...]]:
        return tuple(index for index, _ in self._static), self._keys

    def restore(self, value: Any, outs: Sequence[Any]) -> Any:
        """Returns the tapped pytree `value` with its arrays replaced by `outs`, the results of the tap's equation.

        Leaves that are not arrays stay the same objects. So do leaves through which no derivative flows: keys,
        references, and Python numbers (a trace would lose their type).
        """
        leaves = jax.tree.leaves(value)
        static = {index for index, _ in self._static}
        arrays = (index for index in range(len(leaves)) if index not in static)
        for index, out in zip(arrays, outs, strict=False):
            if not _stays_itself(leaves[index]):
                leaves[index] = out
        return self.tree.unflatten(leaves)

    def unflatten_with(self, float0_leaves: Float0Leaves) -> Callable[[Sequence[Any]], Any]:
        """Returns a function from delivered arrays to the pytree; leaves at `float0_leaves` are float0 zeros."""
        fixed: dict[int, Any] = dict(self._static)
        keys = {key.leaf: key for key in self._keys}
        # Positions in `float0_leaves` count arrays only, not static leaves.
        places = [i for i in range(self.tree.num_leaves) if i not in fixed]
        for position, shape in float0_leaves:
            index = places[position]
            key = keys.pop(index, None)
            fixed[index] = _float0_zeros(shape if key is None else shape[: len(shape) - key.data_ndim])
        if keys:
            return self._fill_with_keys(fixed, [i for i in places if i not in fixed], keys)
        unflatten: Callable[[Sequence[Any]], Any] = self.tree.unflatten
        if self.tree == _LEAF and not fixed:
            return operator.itemgetter(0)
        if not fixed and self.tree.num_leaves:
            return unflatten
        template = [fixed.get(i, _ABSENT) for i in range(self.tree.num_leaves)]

        def fill(arrays: Sequence[Any]) -> Any:
            rest = iter(arrays)
            return unflatten([next(rest) if leaf is _ABSENT else leaf for leaf in template])

        return fill

    def describe(self, float0_leaves: Float0Leaves) -> tree.Description:
        """Returns the structure as plain data, for processes without its classes. A key is described as its data."""
        fixed: dict[int, tree.Description] = {i: tree.describe_value(value) for i, value in self._static}
        places = [i for i in range(self.tree.num_leaves) if i not in fixed]
        fixed.update((places[position], ["float0", list(shape)]) for position, shape in float0_leaves)
        return _describe_node(self.tree, iter(fixed.get(i, ["array"]) for i in range(self.tree.num_leaves)))

    def _fill_with_keys(
        self, fixed: dict[int, Any], places: list[int], keys: dict[int, KeyLeaf]
    ) -> Callable[[Sequence[Any]], Any]:
        def fill(arrays: Sequence[Any]) -> Any:
            leaves = dict(fixed)
            for index, array in zip(places, arrays, strict=True):
                # Only part of a truncated key's data was sent, so it stays data.
                is_key = index in keys and not isinstance(array, TruncatedArray)
                leaves[index] = _make_key(array, keys[index].impl) if is_key else array
            return self.tree.unflatten([leaves[index] for index in range(self.tree.num_leaves)])

        return fill


def _describe_node(node: Any, leaves: Iterator[tree.Description]) -> tree.Description:
    data = node.node_data()
    if data is None:
        return next(leaves)
    kind, static = data
    children = [_describe_node(child, leaves) for child in node.children()]
    if kind is type(None):
        return ["none"]
    if kind in (tuple, list):
        return [kind.__name__, children]
    if kind is dict:
        return ["dict", [tree.describe_value(key) for key in static], children]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return ["namedtuple", kind.__name__, list(kind._fields), children]
    return ["node", f"{kind.__module__}.{kind.__qualname__}", children]


class _CannotBeSent(Exception):
    """A leaf is an array that JAX cannot put on a device. The text continues "X is ..."."""


def split_leaves(
    value: Any, what: str, tap: str | None = None, *, keep_objects: bool = False
) -> tuple[list[Any], TreeTemplate]:
    """Splits a pytree into the arrays that go to the device and the structure that puts them back.

    References (`jax.new_ref`) are read, and typed PRNG keys are replaced by their data.

    Args:
        value: the pytree.
        what: its name in errors.
        tap: the tap and its source line, for errors.
        keep_objects: whether arrays that JAX cannot put on a device (of texts, for example) stay on the host too.

    Raises:
        TypeError: a leaf is an array that JAX cannot put on a device; the text names the leaf and the cure.
        jax.errors.UnexpectedTracerError: a leaf is a tracer whose trace has ended.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(value)
    arrays: list[Any] = []
    static: list[tuple[int, Any]] = []
    keys: list[KeyLeaf] = []
    for index, (path, leaf) in enumerate(leaves):
        escaped = compat.escaped_tracer_error(leaf)
        if escaped is not None:
            raise escaped
        try:
            array = _array_of(leaf)
        except _CannotBeSent as error:
            if not keep_objects:
                where = "" if tap is None else f" (in the tap {tap})"
                raise TypeError(f"{what}{jax.tree_util.keystr(path)} is {error}{where}") from error.__cause__
            array = None
        if array is None:
            static.append((index, leaf))
        elif array.dtype == jax.dtypes.float0:
            static.append((index, _float0_zeros(array.shape)))
        elif is_key(array):
            arrays.append(jax.random.key_data(array))
            keys.append(KeyLeaf(index, jax.random.key_impl(array), arrays[-1].ndim - array.ndim))
        else:
            arrays.append(array)
    # JAX treats an equation without operands as a constant, so an empty array is added. `unflatten_with` skips it.
    return arrays or [jnp.zeros(0, np.uint8)], TreeTemplate(tree, static, keys)


_OR_KEEP_IT_ON_THE_HOST = "or pass it as a keyword argument of the tap, which stays on the host"


def _array_of(leaf: Any) -> Any:
    """Returns the leaf as an array that JAX can trace; None if it stays on the host.

    Raises:
        _CannotBeSent: JAX cannot put the array on a device.
    """
    if isinstance(leaf, jax.Ref):
        leaf = leaf[...]
    if isinstance(leaf, str | bytes | type | enum.Enum):
        return None
    if not isinstance(leaf, jax.Array | jax.core.Tracer) and hasattr(leaf, "__jax_array__"):
        leaf = leaf.__jax_array__()
    if isinstance(leaf, jax.Array | jax.core.Tracer):
        dtype = getattr(leaf, "dtype", None)
        extended = dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        if extended and not is_key(leaf):
            raise _CannotBeSent(
                f"of type {jax.typeof(leaf)}, which has no bytes to send: tap the arrays from which it was made"
            )
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype == jax.dtypes.float0:
            return leaf
        try:
            wire_type_of(leaf.dtype)
        except TypeError as error:
            raise _CannotBeSent(
                f"a numpy array of dtype {leaf.dtype}, which JAX cannot put on a device: convert it to a numeric "
                f"dtype, {_OR_KEEP_IT_ON_THE_HOST}"
            ) from error
    elif not isinstance(leaf, _NUMBERS):
        if not hasattr(type(leaf), "__array__"):
            return None
        raise _CannotBeSent(
            f"a {type(leaf).__module__}.{type(leaf).__qualname__}, an array class that JAX does not know: convert it "
            f"with jax.numpy.asarray, {_OR_KEEP_IT_ON_THE_HOST}"
        )
    return jnp.asarray(leaf)


def is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _stays_itself(leaf: Any) -> bool:
    if isinstance(leaf, np.generic):  # numpy.float64 is a subclass of float
        return False
    return isinstance(leaf, (*_NUMBERS, jax.Ref)) or is_key(leaf)


@functools.lru_cache(maxsize=256)
def _float0_zeros(shape: tuple[int, ...]) -> Any:
    # One object per shape, because fingerprints compare arrays among the static leaves by identity.
    return np.zeros(shape, jax.dtypes.float0)


@functools.cache
def _host_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told not to use the CPU
        return None


def _make_key(data: Any, impl: Any) -> Any:
    # Made on the CPU, because the device that emitted the message may be busy, or wait for this very thread.
    with jax.default_device(_host_device()):
        return jax.random.wrap_key_data(data, impl=impl)
