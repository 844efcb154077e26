"""The program of a capsule: a step that `jax.export` writes, as a function of the arrays among its arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

from hostcallback.api.capsule.digests import digested
from hostcallback.api.export import export_checks
from hostcallback.receiver.capsule.file_format import Input, Shard
from hostcallback.receiver.capsule.writing import Fetch
from hostcallback.tracing import leaves

Static = tuple[tuple[int, ...], tuple[str, ...]]
"""Numbers and names of the arguments that the step's jit does not trace."""


class FlatCall:
    """One call of a step, as a function of the arrays among its arguments.

    Attributes:
        arrays: the arrays, in tree order; of typed PRNG keys the data.
        paths: where they are in the arguments, such as `args[0]['w']`.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, static: Static) -> None:
        """Splits the arguments. Leaves that are no arrays or numbers, and static arguments, become constants."""
        self._fun = fun
        argnums, argnames = static
        positions = {n % len(args) for n in argnums if -len(args) <= n < len(args)}
        found, self._tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._leaves = [leaf for _, leaf in found]
        self._dynamic: list[int] = []
        self.paths: list[str] = []
        for number, (path, leaf) in enumerate(found):
            key = getattr(path[1], "idx", None) if path[0].idx == 0 else getattr(path[1], "key", None)
            is_static = key in positions if path[0].idx == 0 else key in argnames
            if not is_static and isinstance(
                leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex
            ):
                self._dynamic.append(number)
                self.paths.append(("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]))
        self._keys = {
            number: str(jax.random.key_impl(self._leaves[number]))
            for number in self._dynamic
            if leaves.is_key(self._leaves[number])
        }
        self.arrays = [
            jax.random.key_data(self._leaves[n]) if n in self._keys else self._leaves[n]
            for n in self._dynamic
        ]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Calls the step; returns the arrays among its results."""
        filled = list(self._leaves)
        for number, array in zip(self._dynamic, arrays, strict=True):
            impl = self._keys.get(number)
            filled[number] = array if impl is None else jax.random.wrap_key_data(array, impl=impl)
        args, kwargs = jax.tree.unflatten(self._tree, filled)
        results = [
            leaf for leaf in jax.tree.leaves(self._fun(*args, **kwargs)) if isinstance(leaf, jax.Array)
        ]
        return [jax.random.key_data(leaf) if leaves.is_key(leaf) else leaf for leaf in results]

    def export(self) -> bytes:
        """Returns the program with its taps and checks.

        Raises:
            Exception: `jax.export` refuses it, because it has callbacks, for example.
        """
        return _exported(self, self.arrays)

    def export_digests(self) -> bytes:
        """Returns the program with a digest of each operation's result in place of its taps; see `digests`.

        Raises:
            Exception: `jax.export` refuses it, or it uses the results of callbacks.
        """
        return _exported(lambda *arrays: digested(self, arrays), self.arrays)

    def export_digests_promoted(self) -> bytes:
        """Returns the same in 64 bits. Floating-point and complex inputs are promoted; constants are not.

        Raises:
            Exception: as above, or the step does not take such arrays.
        """
        with jax.enable_x64(True):
            return _exported(lambda *arrays: digested(self, arrays), [_promoted(a) for a in self.arrays])

    def inputs(self) -> list[tuple[Input, list[tuple[Shard, Fetch]]]]:
        """Returns the arrays, with functions that fetch their shards from the devices."""
        return [_input(path, array) for path, array in zip(self.paths, self.arrays, strict=True)]


def _exported(function: Callable[..., Any], arrays: list[Any]) -> bytes:
    return bytes(jax.export.export(jax.jit(function), disabled_checks=export_checks())(*arrays).serialize())


def _promoted(array: Any) -> Any:
    dtype = jax.dtypes.result_type(array)
    wide = {"f": np.float64, "c": np.complex128, "V": np.float64}.get(np.dtype(dtype).kind)
    if isinstance(array, bool | int | float | complex) or wide is None:
        return array
    return np.asarray(array).astype(wide)


def _input(path: str, array: Any) -> tuple[Input, list[tuple[Shard, Fetch]]]:
    if not isinstance(array, jax.Array):
        array = np.asarray(jax.numpy.asarray(array))  # with the dtype that the program gets
    shape = tuple(map(int, np.shape(array)))
    name = np.dtype(array.dtype).name
    whole = Shard("", 0, (0,) * len(shape), shape)
    sharding = getattr(array, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1 or sharding.is_fully_replicated:
        mesh, spec = _partition(sharding, len(shape))
        return Input(path, name, shape, (), mesh, spec), [(whole, lambda: np.asarray(_first(array)))]
    mesh, spec = _partition(sharding, len(shape))
    order = {device: number for number, device in enumerate(sharding._device_assignment)}
    shards: list[tuple[Shard, Fetch]] = []
    seen = set()
    for part in array.addressable_shards:
        start = tuple(index.start or 0 for index in part.index)
        if start in seen:  # a replica
            continue
        seen.add(start)
        shard = Shard("", order[part.device], start, tuple(map(int, part.data.shape)))
        shards.append((shard, functools.partial(np.asarray, part.data)))
    return Input(path, name, shape, (), mesh, spec), shards


def _first(array: Any) -> Any:
    return array.addressable_shards[0].data if isinstance(array, jax.Array) else array


def _partition(sharding: Any, dims: int) -> tuple[Any, Any]:
    # Only named shardings can be made again elsewhere; the devices of others are those that the program names.
    if not isinstance(sharding, jax.sharding.NamedSharding) or len(sharding.device_set) == 1:
        return (), ()
    names = [*sharding.spec, *[None] * (dims - len(sharding.spec))]
    spec = tuple(() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in names)
    return tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items()), spec


def placed(entry: Input, fetch: Callable[[Shard], np.ndarray[Any, Any]]) -> Any:
    """Makes an input's array on this process's devices, partitioned as it was.

    Args:
        entry: the input.
        fetch: returns the elements of a shard.
    """
    whole = fetch(entry.shards[0]) if len(entry.shards) == 1 else _assembled(entry, fetch)
    if not entry.mesh:
        return jax.numpy.asarray(whole)
    count = math.prod(size for _, size in entry.mesh)
    devices = np.array(jax.devices()[:count]).reshape([size for _, size in entry.mesh])
    mesh = jax.sharding.Mesh(devices, [name for name, _ in entry.mesh])
    spec = jax.sharding.PartitionSpec(*[names or None for names in entry.spec])
    return jax.device_put(whole, jax.sharding.NamedSharding(mesh, spec))


def _assembled(entry: Input, fetch: Callable[[Shard], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    parts = [(shard, fetch(shard)) for shard in entry.shards]
    whole = np.zeros(entry.shape, parts[0][1].dtype)
    for shard, part in parts:
        whole[tuple(slice(b, b + n) for b, n in zip(shard.start, shard.shape, strict=True))] = part
    return whole
