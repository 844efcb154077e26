"""Splits a tapped pytree into leaves for the device and leaves that stay on the host, and tells those apart."""

from __future__ import annotations

import enum
import functools
import operator
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from hostcallback import _jax_compat as compat
from hostcallback.receiver.wire import array_types, pytree as tree, truncation
from hostcallback.tracing import exact_integers

_ABSENT = object()
_LEAF = jax.tree.structure(0)
_NUMBERS = (bool, int, float, complex)

Float0Leaves = tuple[tuple[int, tuple[int, ...]], ...]
"""(leaf index, shape) of the float0 leaves, which have no bytes and stay on the host."""


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

    __slots__ = ("_keys", "_names", "_static", "tree")

    def __init__(
        self,
        tree: PyTreeDef,
        static: Sequence[tuple[int, Any]],
        keys: Sequence[KeyLeaf] = (),
        names: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """Makes a template.

        Args:
            tree: the pytree's structure.
            static: the (leaf index, value) pairs of its static leaves.
            keys: its typed keys.
            names: what `names_of_nodes` yields.
        """
        self.tree = tree
        self._static = tuple(static)
        self._keys = tuple(keys)
        self._names = tuple(names)

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
        return type(other) is type(self) and (self.tree, self._indices()) == (other.tree, other._indices())

    def __hash__(self) -> int:
        """Agrees with `__eq__`."""
        return hash((self.tree, self._indices()))

    def __str__(self) -> str:
        """Returns a text that is equal in every process."""
        static, keys = self._indices()
        described = f"{describe_structure(self.tree)} static at {static}"
        return f"{described} keys {[(key.leaf, str(key.impl)) for key in keys]}" if keys else described

    def _indices(self) -> tuple[tuple[int, ...], tuple[KeyLeaf, ...]]:
        return tuple(index for index, _ in self._static), self._keys

    def restore(self, value: Any, outs: Sequence[Any]) -> Any:
        """Returns the tapped pytree `value` with its arrays replaced by `outs`, the results of the tap's equation.

        Leaves that are not arrays stay the same objects. So do leaves through which no derivative flows: keys,
        references, Python numbers (a trace would lose their type), and integers that JAX would wrap.
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
        sent = [i for i in range(self.tree.num_leaves) if i not in fixed]
        for position, shape in float0_leaves:
            index = sent[position]
            key = keys.pop(index, None)
            fixed[index] = _float0_zeros(shape if key is None else shape[: len(shape) - key.data_ndim])
        if keys:
            impls = [keys[i].impl if i in keys else None for i in sent if i not in fixed]
            plain = self._filling(fixed)
            return lambda arrays: plain([*map(_key_or_array, arrays, impls)])
        return self._filling(fixed)

    def _filling(self, fixed: dict[int, Any]) -> Callable[[Sequence[Any]], Any]:
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
        sent = [i for i in range(self.tree.num_leaves) if i not in fixed]
        fixed.update((sent[position], ["float0", list(shape)]) for position, shape in float0_leaves)
        leaves = iter(fixed.get(i, ["array"]) for i in range(self.tree.num_leaves))
        return _describe_node(self.tree, leaves, iter(self._names))


def _describe_node(
    node: PyTreeDef, leaves: Iterator[tree.Description], names: Iterator[tuple[Any, ...]]
) -> tree.Description:
    data = node.node_data()
    if data is None:
        return next(leaves)
    kind, static = data
    keys = () if _names_its_children(kind) else next(names)
    children = [_describe_node(child, leaves, names) for child in node.children()]
    if kind is type(None):
        return ["none"]
    if kind in (tuple, list):
        return [kind.__name__, children]
    if kind in (dict, OrderedDict, defaultdict):
        known = static[1] if kind is defaultdict else static
        return ["dict", [tree.describe_value(key) for key in known], children]
    if _is_namedtuple(kind):
        return ["namedtuple", kind.__name__, list(kind._fields), children]
    return _describe_registered(kind, keys, children)


def _describe_registered(
    kind: type, keys: Sequence[Any], children: list[tree.Description]
) -> tree.Description:
    # A reader has no such class. It shows a namedtuple or a dict, whose children have names, if JAX knows them.
    if keys and all(isinstance(key, jax.tree_util.GetAttrKey) for key in keys):
        fields = [key.name for key in keys]
        if len(set(fields)) < len(fields):
            return ["node", f"{kind.__module__}.{kind.__qualname__}", children]
        if not any(field.startswith("_") for field in fields):  # a namedtuple cannot have those
            return ["namedtuple", kind.__name__, fields, children]
        return ["dict", [["value", field] for field in fields], children]
    if keys and all(isinstance(key, jax.tree_util.DictKey) for key in keys):
        described = [tree.describe_value(key.key) for key in keys]
        # Readers compare the keys: 1 and True are one.
        if len({key.key for key in keys}) == len(set(map(repr, described))) == len(keys):
            return ["dict", described, children]
    return ["node", f"{kind.__module__}.{kind.__qualname__}", children]


_BUILTIN = (type(None), tuple, list, dict, OrderedDict, defaultdict)


def _is_namedtuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _names_its_children(kind: type) -> bool:
    # Whether a pytree node of that class and the structure alone tell the names of its children.
    return kind in _BUILTIN or _is_namedtuple(kind)


def names_of_nodes(value: Any, tree: PyTreeDef) -> Iterator[tuple[Any, ...]]:
    """Yields JAX's keys of the children of each node that is of a registered class, outer nodes first.

    Only the value tells them: `tree`, its structure, does not have them.
    """
    data = tree.node_data()
    if data is None:
        return
    children = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)[0]
    if not _names_its_children(data[0]):
        yield tuple(path[0] for path, _ in children)
    for (_, child), structure in zip(children, tree.children(), strict=True):
        yield from names_of_nodes(child, structure)


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
        OverflowError: a leaf is a Python integer of more than 64 bits; the same.
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
                kind = OverflowError if isinstance(error.__cause__, OverflowError) else TypeError
                raise kind(f"{what}{jax.tree_util.keystr(path)} is {error}{where}") from error.__cause__
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
    # JAX's text of a structure says in a few microseconds that it has no node of a registered class.
    names = [*names_of_nodes(value, tree)] if "CustomNode" in str(tree) else []
    # JAX treats an equation without operands as a constant, so an empty array is added. `unflatten_with` skips it.
    return arrays or [jnp.zeros(0, np.uint8)], TreeTemplate(tree, static, keys, names)


def stands_for_scalar(value: Any) -> bool:
    """Whether a value is an object of a registered class that stands for one scalar array, as `flax.nnx.Variable` does.

    It has the array as its only leaf, and that array's `shape` and `dtype` as attributes.
    """
    if isinstance(value, _NOT_BOXES) or not hasattr(value, "dtype") or getattr(value, "shape", None) != ():
        return False
    leaves = jax.tree_util.tree_leaves(value)
    return len(leaves) == 1 and leaves[0] is not value and np.shape(leaves[0]) == ()


def scalar_of(value: Any) -> Any:
    """Returns the scalar array that `value` stands for, where a scalar is meant; any other value as it is."""
    return jax.tree_util.tree_leaves(value)[0] if stands_for_scalar(value) else value


_NOT_BOXES = (jax.Array, compat.Tracer, np.ndarray, np.generic, *_NUMBERS, str, tuple, list, dict)

_JAX_ARRAYS = (compat.Tracer, jax.Array)

_NEVER_ARRAYS = (str, bytes, type, enum.Enum)

_OR_KEEP_IT_ON_THE_HOST = "or pass it as a keyword argument of the tap, which stays on the host"


def _array_of(leaf: Any) -> Any:
    """Returns the leaf as an array that JAX can trace; None if it stays on the host.

    Raises:
        _CannotBeSent: JAX cannot put the array on a device.
    """
    if isinstance(leaf, jax.Ref):
        leaf = leaf[...]
    if isinstance(leaf, _NEVER_ARRAYS):
        return None
    if not isinstance(leaf, _JAX_ARRAYS) and hasattr(leaf, "__jax_array__"):
        leaf = leaf.__jax_array__()
    if isinstance(leaf, _JAX_ARRAYS):
        # JAX's own dtypes, such as those of keys, are no dtypes of numpy.
        if not isinstance(getattr(leaf, "dtype", None), np.dtype) and not is_key(leaf):
            raise _CannotBeSent(
                f"of type {jax.typeof(leaf)}, which has no bytes to send: tap the arrays from which it was made"
            )
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype == jax.dtypes.float0:
            return leaf
        try:
            array_types.wire_type_of(leaf.dtype)
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
    try:
        return exact_integers.to_array(leaf)
    except OverflowError as error:
        raise _CannotBeSent(
            f"a Python integer of more than 64 bits: convert it with float, {_OR_KEEP_IT_ON_THE_HOST}"
        ) from error


def is_key(leaf: Any) -> bool:
    """Whether a value is an array of typed PRNG keys, traced or not."""
    dtype = getattr(leaf, "dtype", None)
    known = dtype is None or isinstance(dtype, np.dtype)  # for most leaves, in a fraction of the time
    return not known and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _stays_itself(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):  # numpy.float64 is a subclass of float
        return exact_integers.wide_dtype(leaf) is not None
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


def _key_or_array(array: Any, impl: Any) -> Any:
    # Only part of a truncated key's data was sent, so it stays data.
    if impl is None or isinstance(array, truncation.TruncatedArray):
        return array
    # Made on the CPU, because the device that emitted the message may be busy, or wait for this very thread.
    # The user's `jax_transfer_guard` is for the program, not for what is received from it.
    with jax.default_device(_host_device()), jax.transfer_guard("allow"):
        return jax.random.wrap_key_data(array, impl=impl)


# ---- What stays on the host, and what tells it apart -----------------------------------------------------------------

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class Fingerprint:
    """A text that is equal in all processes, and the objects that the text does not fully describe.

    Attributes:
        text: deterministic description.
        opaque: objects that only their identity distinguishes (captured lists, instances, arrays). Two fingerprints are
            equal only if these are the same objects.
    """

    __slots__ = ("opaque", "text")

    def __init__(self, *values: Any) -> None:
        """Fingerprints all `values` together, in order."""
        self.opaque: list[Any] = []
        self.text = repr([self._describe(value, 0) for value in values])

    def _describe(self, value: Any, depth: int) -> Any:
        if type(value) in _ATOMS:
            return repr(value)
        if depth > 8:  # a structure nested this deep, or a cycle
            return self._by_identity(value)
        if type(value) is tuple:
            return ["tuple", *(self._describe(v, depth + 1) for v in value)]
        if isinstance(value, enum.Enum):
            return ["member", self._describe(type(value), depth + 1), value.name]
        if isinstance(value, types.FunctionType):
            return self._describe_function(value, depth)
        if isinstance(value, types.MethodType):
            return [
                "method",
                self._describe(value.__func__, depth + 1),
                self._describe(value.__self__, depth + 1),
            ]
        if type(value) is functools.partial:
            parts = (value.func, value.args, tuple(sorted(value.keywords.items())))
            return ["partial", *(self._describe(part, depth + 1) for part in parts)]
        if isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, types.ModuleType | type(None)
        ):
            return ["builtin method", value.__qualname__, self._describe(value.__self__, depth + 1)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type | types.BuiltinFunctionType) and is_global(value):
            return ["named", value.__module__, value.__qualname__]
        return self._by_identity(value)

    def _describe_function(self, function: types.FunctionType, depth: int) -> Any:
        # A closure's variables count by the identity of their cells, not by their current values, because the function
        # or another one that shares the cells may rebind them.
        cells = function.__closure__ or ()
        self.opaque.extend(cells)
        module = sys.modules.get(function.__module__)
        if function.__globals__ is not getattr(module, "__dict__", None):
            self.opaque.append(function.__globals__)
        if set(function.__dict__) - {"__wrapped__"}:
            self.opaque.append(function)
        defaults = (function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items())))
        return [
            "function",
            function.__module__,
            function.__qualname__,
            _describe_code(function.__code__),
            self._describe(defaults, depth + 1),
            len(cells),
        ]

    def _by_identity(self, value: Any) -> Any:
        self.opaque.append(value)
        return ["object", type(value).__module__, type(value).__qualname__]


def is_global(value: Any) -> bool:
    """Whether the module of a class or function, possibly a wrapped one, has it under its qualified name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in (getattr(value, "__qualname__", None) or "<none>").split("."):
        found = getattr(found, part, None)
    return found is value


def describe_structure(tree_structure: object) -> str:
    """Returns a tree structure's text without memory addresses, which differ between processes."""
    return _ADDRESS.sub("0x", str(tree_structure))


def _describe_code(code: types.CodeType) -> Any:
    # Does not use marshal, because its bytes depend on reference counts. Leaves out file names, because checkouts
    # differ.
    constants = [
        _describe_code(c)
        if isinstance(c, types.CodeType)
        else sorted(map(repr, c))
        if isinstance(c, frozenset)
        else repr(c)
        for c in code.co_consts
    ]
    return [code.co_name, code.co_firstlineno, code.co_code.hex(), constants, code.co_names, code.co_varnames]
