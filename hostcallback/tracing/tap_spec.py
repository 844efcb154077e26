"""The static data of one tap in a program: its function, arguments, options, source line, and ids."""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.receiver import environment
from hostcallback.receiver.failures.call_site import CallSite
from hostcallback.receiver.messages import Consumer, Sink
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.batches import LaneMask
from hostcallback.receiver.sinks.factory import Binding, TapParts, make_sink
from hostcallback.receiver.sinks.sharding.sinks import shard_sink
from hostcallback.receiver.wire import pytree, tap_descriptor
from hostcallback.tracing.leaves import Fingerprint, Float0Leaves, TreeTemplate, describe_structure, scalar_of
from hostcallback.tracing.source_line import SourceLine, place_name, user_source_line

SHARDINGS = ("global", "local")


@dataclass(frozen=True, slots=True)
class TapOptions:
    """Options of a tap that are common to all kinds of taps.

    Attributes:
        name: name of the tap in reports.
        ordered: whether its messages keep program order on each device.
        tap_tangents: whether tangents and cotangents are tapped too; the process's default in place of None.
        sharding: "global" or "local"; see `id_tap`.
        device_index: index of the program's device that is reported as the origin of an assembled array.
        tap_transposed: whether a tap in linear code taps the cotangents if that code is transposed; the value of
            `tap_tangents` in place of None.
        keep_objects: whether arrays that JAX cannot put on a device (of texts, for example) stay on the host, like all
            leaves that are not arrays; by default they are refused.
        kind: the kind of the tap.
        params: parameters for the sink of that kind; plain data.
        without_devices: ids of this process's devices on which a check is off.
        place: the call site, for kinds whose reports show it.
        processes: "first", "all" or None; see `id_tap`.
        awaited: whether a program that runs on the thread that dispatches it ends only when the message is delivered.
    """

    name: str
    ordered: bool = True
    tap_tangents: bool | None = None
    sharding: str = "global"
    device_index: int = 0
    tap_transposed: bool | None = None
    keep_objects: bool = False
    kind: tap_descriptor.TapKind = tap_descriptor.TAP
    params: Mapping[str, Any] = field(default_factory=dict)
    without_devices: tuple[int, ...] = ()
    place: CallSite | None = None
    processes: str | None = None
    awaited: bool = False

    def __post_init__(self) -> None:
        """Checks the arguments, which come from users, and replaces those that are None by their defaults.

        Raises:
            TypeError: the name is not a text, or a switch is not a bool.
            ValueError: `sharding` is neither "global" nor "local", or `processes` is none of those above.
        """
        check_name(self.name)
        check_switch("ordered", self.ordered)
        check_switch("tap_tangents", self.tap_tangents, or_none=True)
        check_switch("tap_transposed", self.tap_transposed, or_none=True)
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"sharding={self.sharding!r}, expected 'global' (the tap gets the whole array) or 'local' (each "
                f"device's shard), at {user_source_line()}"
            )
        if self.processes is not None and self.processes not in tap_descriptor.PROCESSES:
            raise ValueError(
                f"processes={self.processes!r}, expected 'first' (only the first process has output), 'all' (each "
                f"process has its own), or None (as jax.debug.print), at {user_source_line()}"
            )
        if self.tap_tangents is None:
            object.__setattr__(self, "tap_tangents", environment.TAP_TANGENTS.read())
        if self.tap_transposed is None:
            object.__setattr__(self, "tap_transposed", self.tap_tangents)


def check_name(name: Any) -> None:
    """Raises TypeError if the name of a tap is not a text."""
    if not isinstance(name, str):
        traced = " (traced values go into the tap's value)" if isinstance(name, jax.core.Tracer) else ""
        raise TypeError(
            f"a tap's name is a text, got {type(name).__name__} {name!r}: name='loss'{traced}, at {user_source_line()}"
        )


def name_or(name: Any, default: Callable[..., str], *of: Any) -> str:
    """Returns the name that a user gives a tap, or `default(*of)` for None and for an empty text.

    Raises:
        TypeError: it is not a text.
    """
    if name is not None:
        check_name(name)
    return str(name) if name else default(*of)


def check_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """Checks an argument that switches something on or off.

    Raises:
        TypeError: it is neither True nor False (nor None, with `or_none`).
    """
    if (
        value is not True
        and value is not False
        and not isinstance(value, np.bool_)
        and not (or_none and value is None)
    ):
        expected = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{name}={value!r}, expected {expected}, at {user_source_line()}")


def check_step(what: str, step: Any) -> None:
    """Checks what a user passes as `step=`.

    Args:
        what: name of the calling function, for errors.
        step: may be traced.

    Raises:
        TypeError: it is not an integer without dimensions.
        ValueError: it is known now, and does not fit an int64.
    """
    dtype = np.int64 if isinstance(step, int) else getattr(step, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.integer) or np.shape(step):
        raise TypeError(
            f"{what}: step is {type(step).__name__} {step!r:.80}, expected an integer or a traced integer without "
            f"dimensions, at {user_source_line()}"
        )
    if isinstance(step, int | np.integer) and not -(2**63) <= int(step) < 2**63:
        raise ValueError(
            f"{what}: step is {step!r:.80}, expected an integer from -2**63 to 2**63 - 1, at {user_source_line()}"
        )


def checked_count(what: str, count: Any) -> Any:
    """Returns a number of steps that a user gives, in at least 32 bits, since others are added to it.

    Of an object that stands for an array, it returns the array.

    Args:
        what: it is, for errors.
        count: may be traced.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is negative.
    """
    count = scalar_of(count)
    if isinstance(count, jax.Array) and jnp.issubdtype(count.dtype, jnp.integer) and not count.shape:
        return count.astype(jnp.promote_types(count.dtype, jnp.int32))
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(
            f"{what} is {count!r:.80}, expected a whole number, traced or not (of a float: .astype(int)), "
            f"at {user_source_line()}"
        )
    if count < 0:
        raise ValueError(f"{what} is {count!r}, expected 0 or more, at {user_source_line()}")
    return int(count)


def callable_name(func: Callable[..., Any] | Any) -> str:
    """Returns the name of a callable for reports."""
    while isinstance(func, functools.partial):
        func = func.func
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return str(name)


def default_name(func: Callable[..., Any]) -> str:
    """Returns the name of a tap without `name=`: that of its function; a lambda is named after the user's line."""
    name = callable_name(func)
    return place_name("lambda") if name.endswith("<lambda>") else name


def callback_options(name: str, ordered: bool, partitioned: bool, processes: str | None = None) -> TapOptions:
    """Returns the options of a tap that works like JAX's callbacks: primals only; other leaves stay on the host."""
    sharding = "local" if partitioned else "global"
    check_switch("partitioned", partitioned)
    return TapOptions(
        name, ordered, tap_tangents=False, sharding=sharding, keep_objects=True, processes=processes
    )


Transform = tuple[str, Any]
"""("batch", dims) | ("jvp", None) | ("transpose", None), and at the end ("mask", levels): hashable, for equations."""

Transforms = tuple[Transform, ...]
"""Those applied to a tap, innermost first."""

ON_ONE_DEVICE = "on_one_device"
"""A key in the `params` of a tap or call. If it is set and the compiler partitions the program, the program's first
device calls the host with whole arrays and the program waits, as for JAX's own callbacks. Otherwise each device sends
its shard of a tap; the value is delivered when the last shard has arrived, perhaps after a later call. Calls are
refused then."""

LAST = "last"
"""A key in the `params` of a tap: a failed check that ends its program does so only after this tap."""

Shards = Literal["all", "some"]
"""Whether this process gets all shards of a program's arrays or only some, because other processes get the rest."""


class TapSpec:
    """The static part of a tap, a parameter of its equations.

    Equal taps are one object (`intern`), so programs with equal taps share consumer ids, and equations may compare
    specs by identity. A spec lives as long as a jaxpr, a program or an eager call refers to it.

    Attributes:
        options: the tap's options.
        source_line: the line of the user's call.
        kwargs: the tap's keyword arguments, for reports.
        places: the call sites at which it was traced, for kinds whose reports show them.
        binding: the functions and objects that take its messages in this process.
        origin: see `Consumer`.
    """

    __slots__ = (
        "__weakref__",
        "_key",
        "binding",
        "fingerprint",
        "kwargs",
        "options",
        "origin",
        "places",
        "source_line",
        "structure",
    )

    def __init__(
        self,
        options: TapOptions,
        *,
        source_line: SourceLine,
        kwargs: Mapping[str, Any],
        structure: TreeTemplate,
        identity: tuple[Any, ...],
        binding: Binding,
    ) -> None:
        """Makes a spec that is not interned. `identity`: all else on which the sink's behaviour depends."""
        self.options = options
        self.source_line = source_line
        self.kwargs = dict(kwargs)
        self.places: list[CallSite] = []
        self.structure = structure
        self.binding = binding
        self.origin: Any = None
        self.fingerprint = Fingerprint(identity, tuple(sorted(kwargs.items())))
        line = (source_line.module, source_line.function, source_line.line)
        text = repr(
            (options.name, line, *_parts(options), describe_structure(structure), self.fingerprint.text)
        )
        self._key = hashlib.blake2b(text.encode(), digest_size=16).digest()

    @property
    def name(self) -> str:
        """The tap's name in reports."""
        return self.options.name

    def __repr__(self) -> str:
        """The text in printed jaxprs."""
        return f"{self.name}@{self.source_line.module}:{self.source_line.line}"

    def intern(self) -> TapSpec:
        """Returns the living spec that equals this one; this one if none exists."""
        # Addresses identify the captured objects as long as a spec that holds them lives. The entry lives no longer.
        key = (self._key, tuple(map(id, self.fingerprint.opaque)), self.structure)
        with _interned_lock:
            live = _interned.get(key)
            if live is not None:
                return live
            _interned[key] = self
            others = self._key in _unnumbered  # a spec with the same text, whose structure differs
            if self.fingerprint.opaque or self.structure.has_addresses or others:
                # Taps that differ only in captured objects (two calls of one closure factory) or in objects of their
                # structure are numbered in the order of their first trace, which is equal in all processes of a
                # program. Numbers are not reused, because messages of a dropped program may still arrive.
                ordinal = _ordinals.get(self._key, 0)
                _ordinals[self._key] = ordinal + 1
                self._key += ordinal.to_bytes(8, "little")
            else:
                _unnumbered[self._key] = self
        return self

    def of(self, origin: Any, number: int) -> TapSpec:
        """Returns the tap for one program only, so that its messages have a consumer of their own.

        Args:
            origin: what belongs to the program; see `Consumer`.
            number: of the program among those with taps of their own, equal in all processes.
        """
        other = copy.copy(self)
        other.origin = origin
        other._key = self._key + b"of" + number.to_bytes(8, "little")
        return other

    def consumer_id(
        self, transforms: Transforms, float0_leaves: Float0Leaves, shards: Shards | None = None
    ) -> int:
        """Returns 64 bits that are equal in every process that traces the same tap; never 0."""
        digest = hashlib.blake2b(repr((self._key, transforms, float0_leaves, shards)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little") or 1

    def consumer(
        self,
        transforms: Transforms,
        float0_leaves: Float0Leaves,
        shards: Shards | None = None,
        *,
        switchable: bool = False,
    ) -> Consumer:
        """Returns the consumer of this tap's messages.

        Args:
            transforms: the transformations applied to the tap.
            float0_leaves: its float0 leaves.
            shards: which shards of its arrays this process gets, if the compiler partitions them.
            switchable: whether rules can switch it off by name.
        """
        parts = TapParts(
            str(self.source_line),
            self.options.params,
            self.kwargs,
            public_transforms(transforms, float0_leaves),
            self.structure.unflatten_with(float0_leaves),
            self.places,
        )
        mask = LaneMask.of(parts.transforms)
        sink = make_sink(self.options.kind, parts, self.binding)
        assert (
            sink is not None
        )  # a tap that was traced in this process has a function, or its kind has a sink
        return Consumer(
            consumer_id=self.consumer_id(transforms, float0_leaves, shards),
            name=self.name,
            source_line=parts.source_line,
            sink=sink if shards is None else self._shard_sink(sink, shards),
            transforms=parts.transforms,
            kwargs=self.kwargs,
            is_check=self.options.kind.is_check,
            own_rate=self.options.params.get("own_rate"),
            is_switchable=switchable,
            describe=functools.partial(self.describe, transforms, float0_leaves, shards, with_places=True),
            unflatten=parts.unflatten if mask is None else mask.unflattening(parts.unflatten),
            origin=self.origin,
        )

    def _shard_sink(self, sink: Sink, shards: Shards) -> Sink:
        return shard_sink(
            sink,
            self.options.sharding,
            assemble=shards == "all",
            processes=self.options.processes,
            device_index=self.options.device_index,
            is_another_receiver_busy=runtime.is_another_receiver_busy,
        )

    def describe(
        self,
        transforms: Transforms,
        float0_leaves: Float0Leaves,
        shards: Shards | None = None,
        *,
        with_places: bool = False,
    ) -> tap_descriptor.TapDescriptor:
        """Returns the descriptor of the tap, for processes that run the program but did not trace it.

        It omits keyword arguments that are not plain data. `with_places` adds the call sites of a check so far.
        """
        params = dict(self.options.params)
        if with_places and self.places:
            params["places"] = [[list(map(list, place.stack)), place.span] for place in self.places]
        if shards is not None and self.options.device_index:
            params["device_index"] = self.options.device_index
        if self.options.processes is not None:
            params["processes"] = self.options.processes
        return tap_descriptor.TapDescriptor(
            name=self.name,
            source_line=str(self.source_line),
            consumer_id=self.consumer_id(transforms, float0_leaves, shards),
            kind=self.options.kind.text,
            params=params,
            kwargs={key: value for key, value in self.kwargs.items() if pytree.is_plain(value)},
            transforms=public_transforms(transforms, float0_leaves),
            tree=self.structure.describe(float0_leaves),
            shards=shards,
            sharding=self.options.sharding,
        )


_interned_lock = threading.Lock()  # protects the three tables: threads trace at the same time
_interned: weakref.WeakValueDictionary[Any, TapSpec] = weakref.WeakValueDictionary()
_ordinals: dict[bytes, int] = {}
_unnumbered: weakref.WeakValueDictionary[bytes, TapSpec] = weakref.WeakValueDictionary()


def _parts(options: TapOptions) -> tuple[Any, ...]:
    # The options, other than the name, that distinguish taps of one line.
    parts: tuple[Any, ...] = (
        options.ordered, options.tap_tangents, options.tap_transposed, options.sharding, options.device_index,
    )  # fmt: skip
    if options.processes is not None:
        parts = (*parts, options.processes)
    return (*parts, options.without_devices) if options.kind.is_check else parts


def public_transforms(
    transforms: Transforms, float0_leaves: Float0Leaves = ()
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns `transforms` as tap functions get them: `(("batch", {"batch_dims": (0, None)}), ("jvp", {}))`.

    The batches are those of the elements that take part; see `receiver.sinks.batches`.
    """
    public = [(name, {"batch_dims": data} if name in ("batch", "mask") else {}) for name, data in transforms]
    mask = LaneMask.of(public)
    if mask is None:
        return tuple(public)
    held = dict(float0_leaves)
    operands = [mask.batch_dims(i) for i in range(len(mask.levels[0]) - 1)]
    found, level, shown = [], 0, 0  # numbers of vmaps: as they were, and as the consumer sees them
    for name, params in public:
        if name == "batch":
            level += 1
            if level - 1 in mask.merged:
                continue
            dims = iter([of_operand[shown] for of_operand in operands])
            count = len(params["batch_dims"])
            params = {"batch_dims": tuple(None if i in held else next(dims) for i in range(count))}
            shown += 1
        found.append((name, params))
    return tuple(found)


def check_kwargs(kwargs: dict[str, Any], name: str, tap: str) -> None:
    """Raises TypeError if a value, or a leaf of one, is traced.

    Args:
        kwargs: keyword arguments for the sink, which stay on the host.
        name: the tap's.
        tap: its name and source line, for the error.
    """
    for key, value in kwargs.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"the keyword argument {key!r} of {name} is a traced value, {value!r}, and keyword arguments "
                "stay on the host: put it into the tapped pytree, such as id_tap(tap_func, {'x': x, 'step': step}) "
                f"(in the tap {tap})"
            )
