"""The programs of a capsule: written by `jax.export`, two of them with a digest of each operation; loaded, and run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from hostcallback import _jax_compat as compat
from hostcallback.api.barrier import barrier_wait
from hostcallback.api.export import bind, export_checks, unbind
from hostcallback.lowering import xray
from hostcallback.lowering.cells import values_as_defaults
from hostcallback.lowering.equations import OUTERMOST, Position, structure_of
from hostcallback.lowering.evaluator import Evaluator, Records, is_only_effect
from hostcallback.primitives.tap import bind_tap
from hostcallback.receiver.capsule.file_format import PROGRAM, PROMOTED, WATCHED, CapsuleError, Input
from hostcallback.receiver.capsule.reading import Capsule
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.tracing.tap_spec import TapOptions

TAP = "capsule operations"
"""Name of the tap of the digests."""

SMALL = ("int2", "int4", "uint2", "uint4", "int1", "uint1")

FIRST = 4
"""Number of elements, the first ones, that a digest has."""


# ---- Writing them ----------------------------------------------------------------------------------------------------


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

    def function(*arrays: jax.Array) -> list[jax.Array]:
        values = [compat.wrap_keys(a, t) if _is_key(t) else a for a, t in zip(arrays, avals, strict=True)]
        outs, _ = evaluator.evaluate(program.closed, values)
        return [data_of(out) for out in outs]

    shardings = tuple(s if mesh_of(s)[0] else None for s in program.shardings)
    options: dict[str, Any] = {"in_shardings": shardings} if any(shardings) else {}
    with values_as_defaults(), jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
        given = [struct_of(aval, wide=wide) for aval in avals]
        exported = jax.export.export(jax.jit(function, **options), disabled_checks=export_checks())(*given)
    return bytes(exported.serialize())


def _is_key(aval: compat.Aval) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key))


def data_of(value: jax.Array) -> jax.Array:
    """Returns the array, or the key data if it holds typed keys."""
    return jax.random.key_data(value) if _is_key(jax.typeof(value)) else value


def struct_of(aval: compat.Aval, *, wide: bool = False) -> Any:
    """The shape and dtype of an array (of the key data for typed keys); with `wide` in 64 bits."""
    if _is_key(aval):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return jax.ShapeDtypeStruct(aval.shape, promoted_dtype(aval.dtype) if wide else aval.dtype)


def mesh_of(sharding: Sharding | None, dims: int = 0) -> tuple[Any, Any]:
    """The axes of the mesh of a sharding over several devices, and the axes of each dimension; empty for others.

    Only named shardings can be made again elsewhere; the devices of others are those that the program names.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1:
        return (), ()
    names = [*sharding.spec, *[None] * (dims - len(sharding.spec))]
    spec = tuple(() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in names)
    return tuple((str(name), int(size)) for name, size in sharding.mesh.shape.items()), spec


# ---- Digests of operations -------------------------------------------------------------------------------------------


class Digests(Evaluator):
    """Evaluates a program with digests of the results of its operations. Its taps and prints do nothing.

    A message has the digests of the operations of one jaxpr, or of the part of it before a loop or branch:
    `{"hash": uint32 [n], "stats": float [n, 4 + FIRST], "bad": int32 [n, 3], "finite": float [n, 2], "iterations":
    [int32 scalar, ...]}` (see `Digest`), and the keyword argument `operations` with a line for each.
    """

    counts = True

    def __init__(self) -> None:
        self._names: list[str] = []
        self._hashes: list[Any] = []
        self._stats: list[tuple[jax.Array, jax.Array, jax.Array]] = []

    def enters(self, equation: compat.JaxprEqn, position: Position) -> bool:
        return True

    def bind(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        # What calls the host by `io_callback` cannot be exported, and that is reported.
        if is_only_effect(equation) and equation.primitive.name != "io_callback":
            return list(values)[: len(equation.outvars)]
        return self.compute(equation, values)

    def compute(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates an operation of the program."""
        return compat.bind_equation(equation, values)

    def made(
        self,
        equation: compat.JaxprEqn,
        values: list[jax.Array],
        outs: Sequence[jax.Array],
        position: Position,
        records: Records,
    ) -> None:
        for out in outs:
            if _is_digestible(out) and not structure_of(equation).is_open:
                self._names.append(_name_of(equation, position, out))
                made = compat.without_sharding_types(lambda out: (_hash_of(out), _stats_of(out)), out)
                self._hashes.append(made[0])
                self._stats.append(made[1])

    def ends(self, position: Position) -> None:
        if not self._names:
            return
        stats, bad, finite = map(jnp.stack, zip(*self._stats, strict=True))
        sent = {
            "hash": jnp.stack(self._hashes), "stats": stats, "bad": bad, "finite": finite,
            "iterations": list(position.iterations),
        }  # fmt: skip
        names = "\n".join(self._names)  # a program is exported with plain keyword arguments only
        self._names, self._hashes, self._stats = [], [], []
        options = TapOptions(TAP, tap_tangents=False, sharding="local")
        bind_tap(
            sent, (), {"operations": names}, Binding(_nothing), identity=("digests", names), options=options
        )


class PromotedDigests(Digests):
    """The same in 64 bits: floating-point and complex values are promoted, also where the program converts them."""

    def evaluate(
        self, jaxpr: compat.AnyJaxpr, values: Sequence[jax.Array], position: Position = OUTERMOST
    ) -> tuple[list[Any], Records]:
        outs, records = super().evaluate(jaxpr, [_wide(value) for value in values], position)
        return [_wide(out) for out in outs], records

    def holds(self, jaxpr: compat.AnyJaxpr, values: Sequence[jax.Array]) -> Any:
        # Not `self.evaluate`: its digests would be sent before each iteration.
        return _Conditions().evaluate(jaxpr, values)[0][0]

    def compute(self, equation: compat.JaxprEqn, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Evaluates an operation in 64 bits if there is one that does; with its own types otherwise."""
        avals = list(map(compat.aval_of, equation.outvars))
        wide = [_wide(value) for value in values]
        try:
            params = {key: self._promoted(value) for key, value in equation.params.items()}
            outs = compat.bind_equation(equation.replace(params=params), wide)
            if [(x.shape, x.dtype) for x in outs] == [(a.shape, promoted_dtype(a.dtype)) for a in avals]:
                return outs
        except (TypeError, ValueError, NotImplementedError, AttributeError):
            pass  # it takes no such arrays: random bits, kernels, functions of frameworks
        narrow = [
            _as(value, compat.aval_of(v).dtype) for value, v in zip(values, equation.invars, strict=True)
        ]
        return [_wide(out) for out in compat.bind_equation(equation, narrow)]

    @staticmethod
    def _promoted(param: Any) -> Any:
        if isinstance(param, np.dtype):
            return promoted_dtype(param)
        if isinstance(
            param, compat.Jaxpr | compat.ClosedJaxpr
        ):  # how a scatter or reduction combines two elements
            avals = [struct_of(compat.aval_of(v), wide=True) for v in compat.open_jaxpr(param)[0].invars]
            closed = compat.closed_jaxpr(lambda *values: _Conditions().evaluate(param, values)[0], avals)
            return closed if isinstance(param, compat.ClosedJaxpr) else closed.jaxpr
        return param


class _Conditions(PromotedDigests):
    def made(self, *arguments: Any) -> None:
        return


def promoted_dtype(dtype: Any) -> Any:
    """Returns float64 or complex128 for floating-point and complex dtypes; other dtypes are returned unchanged."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide(value: jax.Array) -> jax.Array:
    dtype = getattr(jax.typeof(value), "dtype", None)
    return value if dtype is None else _as(value, promoted_dtype(dtype))


def _as(value: jax.Array, dtype: Any) -> jax.Array:
    return value if jax.typeof(value).dtype == dtype else jax.lax.convert_element_type(value, dtype)


def _nothing(value: jax.Array, operations: Any) -> None:
    """Receives digests in the process that wrote the program, which does not run it."""


def _is_digestible(value: jax.Array) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not np.size(value) or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(np.dtype(dtype).kind in "biufcV")


def _name_of(equation: compat.JaxprEqn, position: Position, out: Any) -> str:
    line, scope, is_backward = position.place_of(equation)
    backward = " (backward)" if is_backward else ""
    text = f"{equation.primitive.name}{backward} {list(np.shape(out))} at {line or 'unknown line'}"
    return f"{text}, scope {scope}" if scope else text


def _hash_of(value: jax.Array) -> Any:
    # Depends on each bit and on its index. Unsigned sums wrap, so it does not depend on their order.
    value = jax.lax.stop_gradient(value)
    kind = np.dtype(value.dtype).kind
    if kind == "c":
        return _hash_of(jnp.real(value)) + jnp.uint32(3) * _hash_of(jnp.imag(value))
    if kind == "b":
        words = value.astype(jnp.uint32)
    else:
        size = np.dtype(value.dtype).itemsize
        if np.dtype(value.dtype).name in SMALL:
            value, size = value.astype(jnp.int8), 1
        words = jax.lax.bitcast_convert_type(value, {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32))
        words = words.astype(jnp.uint32)
    words = words.reshape(-1)
    odd = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(2654435762) + jnp.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _stats_of(value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # The `stats`, `bad` and `finite` of a digest; of complex values those of the magnitudes.
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    flat = jnp.reshape(jnp.abs(value) if np.dtype(value.dtype).kind == "c" else value, -1)
    flat = jax.lax.stop_gradient(flat).astype(dtype)
    first = jnp.pad(flat[:FIRST], (0, max(0, FIRST - flat.size)))
    stats = jnp.stack([flat.min(), flat.max(), flat.mean(), jnp.sqrt(jnp.mean(flat * flat))])
    finite, nans = jnp.isfinite(flat), jnp.isnan(flat).sum()
    bad = jnp.stack([nans, (~finite).sum() - nans, jnp.argmin(finite)]).astype(jnp.int32)
    low, high = jnp.where(finite, flat, jnp.inf).min(), jnp.where(finite, flat, -jnp.inf).max()
    return jnp.concatenate([stats, first]), bad, jnp.stack([low, high])


def not_finite_text(value: jax.Array) -> str:
    """How many elements are NaN or infinite, the index of the first, and the range of the others."""
    _, bad, ends = _stats_of(value)
    return _not_finite(tuple(map(int, bad)), tuple(map(float, ends)), value.shape)


def _not_finite(bad: tuple[int, ...], ends: tuple[float, ...], shape: tuple[int, ...]) -> str:
    nans, infinite, first = bad
    text = f"{nans:,} NaN and {infinite:,} infinite values"
    if not shape or not 0 <= first < math.prod(shape) < 2**31:  # a capsule may be foreign
        return text
    index = ", ".join(map(str, np.unravel_index(first, shape)))
    text += f" of {math.prod(shape):,}, the first at [{index}]"
    return text + ("; the finite ones: min {:g}, max {:g}".format(*ends) if math.isfinite(ends[0]) else "")


# ---- Loading them ----------------------------------------------------------------------------------------------------


def load(capsule: Capsule, program: str = PROGRAM) -> jax.export.Exported:
    """Returns the program of a capsule.

    Raises:
        CapsuleError: it was left out, or this JAX cannot read it.
    """
    if not capsule.has(program):
        why = next((text for text in capsule.left_out if text.startswith("the program")), "it was left out")
        raise CapsuleError(
            f"{capsule.path} has no {program}: {why}. Its inputs can be read: receiver.Capsule"
        )
    data = bytearray(capsule.member(program))
    try:
        exported = jax.export.deserialize(data)
    except Exception as error:
        made = capsule.about.get("versions")
        wrote = str(made.get("jax", "?"))[:80] if isinstance(made, dict) else "?"
        raise CapsuleError(
            f"{capsule.path}: JAX {jax.__version__} cannot read the program, which JAX {wrote} wrote: "
            f"{first_line(error)}. JAX reads programs of versions up to six months older"
        ) from None
    if len(exported.in_avals) != len(capsule.inputs):
        raise CapsuleError(
            f"{capsule.path}: the program takes {len(exported.in_avals)} arrays, and the capsule has "
            f"{len(capsule.inputs)}"
        )
    return exported


def arrays_of(capsule: Capsule, devices: int = 1) -> list[jax.Array]:
    """Returns the inputs on this process's devices, partitioned as they were, for a program on `devices` of them.

    Raises:
        CapsuleError: some were left out, or need more devices.
    """
    missing = [entry for entry in capsule.inputs if entry.left_out]
    if missing:
        raise CapsuleError(
            f"{capsule.path}: {len(missing)} input(s) are not in the capsule, such as {missing[0].path}: "
            f"{missing[0].left_out}"
        )
    most = max((devices, *(math.prod(size for _, size in entry.mesh) for entry in capsule.inputs)))
    if most > len(jax.devices()):
        raise CapsuleError(
            f"{capsule.path}: the program ran on {most} devices, and there are {len(jax.devices())}: on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={most}"
        )
    # What was on one device goes to all of those of the program.
    mesh = next(
        (entry.mesh for entry in capsule.inputs if entry.mesh), (("devices", devices),) if devices > 1 else ()
    )
    return [_placed(capsule, entry, mesh) for entry in capsule.inputs]


def _placed(capsule: Capsule, entry: Input, mesh: tuple[tuple[str, int], ...]) -> Any:
    has, whole = sum(math.prod(shard.shape) for shard in entry.shards), math.prod(entry.shape)
    if not entry.shards or has != whole:
        raise CapsuleError(f"{capsule.path}: {entry.path} has {has:,} of its {whole:,} elements")
    axes, names = (entry.mesh, entry.spec) if entry.mesh else (mesh, ())
    try:
        array = _assembled(capsule, entry)
        if not axes:
            return jnp.asarray(array)
        shape = [size for _, size in axes]
        devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
        spec = jax.sharding.PartitionSpec(*[each or None for each in names])
        of_all = jax.sharding.Mesh(devices, [name for name, _ in axes])
        return jax.device_put(array, jax.sharding.NamedSharding(of_all, spec))
    except (CapsuleError, OSError, MemoryError):
        raise
    except Exception as error:  # a mesh or dtype that JAX does not have
        raise CapsuleError(f"{capsule.path}: {entry.path} cannot be made: {first_line(error)}") from None


def _assembled(capsule: Capsule, entry: Input) -> np.ndarray[Any, Any]:
    parts = [(shard, capsule.array(entry, shard)) for shard in entry.shards]
    if len(parts) == 1:
        return parts[0][1]
    whole = np.zeros(entry.shape, parts[0][1].dtype)
    for shard, part in parts:
        whole[tuple(slice(b, b + n) for b, n in zip(shard.start, shard.shape, strict=True))] = part
    return whole


def first_line(error: Exception) -> str:
    """The type of an exception, and the first line of its text."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:500]}"


# ---- The results of their operations ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digest:
    """The result of one operation in one run.

    Attributes:
        name: primitive, shape, line and scope.
        iterations: numbers of the iterations of the loops around it, outermost first.
        occurrence: how many operations of that name were before it, in the same iterations.
        hash: of its bits.
        stats: smallest, largest, mean, root mean square, and the first elements.
        bad: number of NaN, number of infinite values, and the index of the first one of these in the flat array.
            Empty in runs of other environments, and of capsules of earlier versions, as `finite` is.
        finite: the smallest and the largest finite value; infinite if there is none.
    """

    name: str
    iterations: tuple[int, ...]
    occurrence: int
    hash: int
    stats: tuple[float, ...]
    bad: tuple[int, ...] = ()
    finite: tuple[float, ...] = ()

    @property
    def not_finite(self) -> str:
        """See `not_finite_text`; empty if all values are finite, or if it is not known."""
        shape = re.search(r" \[([\d, ]*)\] at ", self.name)
        if not shape or not shape[1] or not any(self.bad[:2]):
            return ""
        return _not_finite(self.bad, self.finite, tuple(int(size) for size in shape[1].split(",")))


def digests(capsule: Capsule, program: str = WATCHED, device: jax.Device | None = None) -> list[Digest]:
    """Runs a program of digests on a device, or where the inputs are; returns what it sends, in program order.

    Raises:
        CapsuleError: the program was left out, or cannot be run here.
    """
    exported = load(capsule, program)
    arrays = arrays_of(capsule, exported.nr_devices)
    of_devices: dict[int, list[Digest]] = {}  # which send at the same time

    def receive(value: dict[str, Any], operations: str, device: Any) -> None:
        found = of_devices.setdefault(device.id, [])
        iterations = tuple(int(number) for number in value["iterations"])
        names = operations.split("\n")
        bad, ends = (value.get(key, [()] * len(names)) for key in ("bad", "finite"))
        for name, bits, stats, *more in zip(names, value["hash"], value["stats"], bad, ends, strict=True):
            key = (name, iterations)
            counts, of_finite = (tuple(each.tolist()) if len(each) else () for each in more)
            found.append(Digest(*key, 0, int(bits), tuple(map(float, stats)), counts, of_finite))

    bind(TAP, receive)
    try:
        with jax.enable_x64(program == PROMOTED or bool(capsule.about.get("x64"))):
            given = [jnp.asarray(a, aval.dtype) for a, aval in zip(arrays, exported.in_avals, strict=True)]
            if device is not None:
                given = jax.device_put(given, device)
            jax.block_until_ready(jax.jit(exported.call)(*given))
        barrier_wait()
    finally:
        unbind(TAP)
    each = zip_longest(*(of_devices[number] for number in sorted(of_devices)))
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    found = []
    for digest in filter(None, chain.from_iterable(each)):
        key = digest.name, digest.iterations
        found.append(replace(digest, occurrence=seen[key]))
        seen[key] += 1
    return found
