"""What a capsule has of a program: the program as `jax.export` writes it, and its inputs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from hostcallback import _jax_compat as compat
from hostcallback.api.capsule.digests import Digests, PromotedDigests, promoted_dtype
from hostcallback.api.export import export_checks
from hostcallback.lowering import xray
from hostcallback.lowering.evaluator import Evaluator, Place
from hostcallback.receiver.capsule.file_format import PROGRAM, PROMOTED, WATCHED, Input, Shard
from hostcallback.receiver.capsule.writing import Fetch

SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable")
"""Settings of JAX on which the code of a program depends; a thread may have its own."""


def settings() -> dict[str, Any]:
    """The settings of the calling thread, for `own_work`."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


@contextlib.contextmanager
def own_work(found: Mapping[str, Any]) -> Iterator[None]:
    """A block in which programs are traced with these settings, whatever the user has set, and get no taps."""
    x64, precision, threefry = (found[name] for name in SETTINGS)
    with (
        xray.closed(),
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.enable_x64(x64),
        jax.default_matmul_precision(precision),
        jax.threefry_partitionable(threefry),
    ):
        yield


# ---- Programs --------------------------------------------------------------------------------------------------------


def programs(program: xray.Program) -> Sequence[tuple[str, str, Callable[[], bytes]]]:
    """The members of a capsule that are programs: name, title, and a function that exports it.

    Such a function raises any exception where `jax.export` refuses the program: it has callbacks, for example.
    """
    return (
        (PROGRAM, "the program", lambda: _exported(program, Evaluator())),
        (WATCHED, "the program for --bisect", lambda: _exported(program, Digests())),
        (
            PROMOTED,
            "the program for --bisect float64",
            lambda: _exported(program, PromotedDigests(), wide=True),
        ),
    )


def _exported(program: xray.Program, evaluator: Evaluator, *, wide: bool = False) -> bytes:
    avals = list(program.closed.in_avals)

    def function(*arrays: Any) -> list[Any]:
        values = [compat.wrap_keys(a, t) if _is_key(t) else a for a, t in zip(arrays, avals, strict=True)]
        outs, _ = evaluator.evaluate(program.closed, values, Place())
        return [data_of(out) for out in outs]

    shardings = [None] * len(program.constants) + list(program.shardings)
    if all(mesh_of(sharding)[0] == () for sharding in shardings):
        options: dict[str, Any] = {}
    else:
        options = {"in_shardings": tuple(s if mesh_of(s)[0] else None for s in shardings)}
    with jax.enable_x64(wide or settings()["jax_enable_x64"]):
        given = [_struct(aval, wide=wide) for aval in avals]
        exported = jax.export.export(jax.jit(function, **options), disabled_checks=export_checks())(*given)
    return bytes(exported.serialize())


def _is_key(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def data_of(value: Any) -> Any:
    """An array; of typed keys their data."""
    return jax.random.key_data(value) if _is_key(jax.typeof(value)) else value


def _struct(aval: Any, *, wide: bool = False) -> Any:
    if _is_key(aval):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, promoted_dtype(aval.dtype) if wide else aval.dtype)


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def fitting(program: xray.Program, max_bytes: int, most: int) -> list[int]:
    """The numbers of the inputs that a message may have: the smallest first, in all `max_bytes`, and `most` arrays."""
    first, total = len(program.constants), 0
    sizes = [nbytes(_struct(aval)) for aval in program.closed.in_avals[first:]]
    found: list[int] = []
    for number in sorted(range(len(sizes)), key=sizes.__getitem__):
        total += sizes[number]
        if total <= max_bytes and len(found) < most:
            found.append(number)
    return sorted(found)


def nbytes(array: Any) -> int:
    """The size of an array that is described by its shape and dtype."""
    return int(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize)


def devices_of(program: xray.Program) -> set[Any]:
    """The devices over which inputs of a program are partitioned."""
    return {device for s in program.shardings if s is not None for device in s.device_set}


def inputs(
    program: xray.Program,
    constants: Sequence[Any],
    arrays: Mapping[int, np.ndarray[Any, Any]],
    why_not: str,
) -> list[tuple[Input, list[tuple[Shard, Fetch]]]]:
    """The constants and inputs of a program, with functions that return their elements.

    Args:
        program: the program.
        constants: of typed keys their data.
        arrays: by the number of the input, its elements.
        why_not: why others are not there.
    """
    first, names = len(program.constants), set()
    found: list[tuple[Input, list[tuple[Shard, Fetch]]]] = []
    for number, aval in enumerate(map(_struct, program.closed.in_avals)):
        path = "/".join(program.paths[number - first]) if number >= first else f"constant {number}"
        path = path or f"input {number - first}"
        if path in names:
            path = f"{path} ({number})"
        names.add(path)
        sharding = program.shardings[number - first] if number >= first else None
        mesh, spec = mesh_of(sharding, len(aval.shape))
        whole = Shard("", 0, (0,) * len(aval.shape), tuple(map(int, aval.shape)))
        array = constants[number] if number < first else arrays.get(number - first)
        left_out = why_not if array is None else ""
        entry = Input(path, np.dtype(aval.dtype).name, whole.shape, (), mesh, spec, left_out)
        found.append((entry, [(whole, functools.partial(np.asarray, array))]))
    return found


def mesh_of(sharding: Any, dims: int = 0) -> tuple[Any, Any]:
    """The axes of the mesh of a sharding over several devices, and the axes of each dimension; empty for others.

    Only named shardings can be made again elsewhere; the devices of others are those that the program names.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1:
        return (), ()
    names = [*sharding.spec, *[None] * (dims - len(sharding.spec))]
    spec = tuple(() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in names)
    return tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items()), spec


def placed(
    entry: Input, fetch: Callable[[Shard], np.ndarray[Any, Any]], mesh: tuple[tuple[str, int], ...]
) -> Any:
    """Makes an input's array on this process's devices, partitioned as it was.

    Args:
        entry: the input.
        fetch: returns the elements of a shard.
        mesh: names and sizes of the axes of the program's devices, which each get an array that was not partitioned;
            empty for one device.
    """
    whole = fetch(entry.shards[0]) if len(entry.shards) == 1 else _assembled(entry, fetch)
    axes, names = (entry.mesh, entry.spec) if entry.mesh else (mesh, ())
    if not axes:
        return jnp.asarray(whole)
    shape = [size for _, size in axes]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    spec = jax.sharding.PartitionSpec(*[each or None for each in names])
    return jax.device_put(
        whole, jax.sharding.NamedSharding(jax.sharding.Mesh(devices, [name for name, _ in axes]), spec)
    )


def _assembled(entry: Input, fetch: Callable[[Shard], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    parts = [(shard, fetch(shard)) for shard in entry.shards]
    whole = np.zeros(entry.shape, parts[0][1].dtype)
    for shard, part in parts:
        whole[tuple(slice(b, b + n) for b, n in zip(shard.start, shard.shape, strict=True))] = part
    return whole
