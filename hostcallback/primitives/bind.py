"""What every tap does when it is traced: takes its argument apart and binds one tap equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from hostcallback.primitives import late_rules
from hostcallback.primitives.tap import tap_p
from hostcallback.tracing import leaves
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_spec import SinkFactory, TapSpec
from receiver import environment
from receiver.messages.call_site import CallSite, note_place
from receiver.wire import tap_kind
from receiver.wire.tap_kind import TapKind

SHARDINGS = ("global", "local")


@dataclass(frozen=True, slots=True)
class TapOptions:
    """How a tap is emitted, whatever its messages are for.

    Attributes:
        name: what the tap is called in reports.
        ordered: whether its messages keep program order on each device.
        tap_tangents: whether tangents and cotangents are tapped too; None for the process's default.
        sharding: "global" or "local"; see `id_tap`.
        device_index: which of the program's devices an array assembled from its shards is said to come from.
        tap_transposed: whether a tap in linear code taps the cotangents where that code is transposed; None for what
            `tap_tangents` says.
        keep_objects: whether arrays that JAX cannot put on a device (of texts, say) stay on the host, as every leaf
            does that is no array; by default they are refused.
        kind: what the tap's messages are for.
        params: what a sink of that kind needs; plain data.
        check: whether the first array is a predicate, and a message is sent only where it does not hold.
        folds: whether of its failures in a row, of such a check, only the first and the last need be read.
        without_devices: ids of this process's devices on which such a check does not check.
        place: where it is traced, for those whose reports show that.
    """

    name: str
    ordered: bool = True
    tap_tangents: bool | None = None
    sharding: str = "global"
    device_index: int = 0
    tap_transposed: bool | None = None
    keep_objects: bool = False
    kind: TapKind = tap_kind.TAP
    params: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False
    folds: bool = False
    without_devices: tuple[int, ...] = ()
    place: CallSite | None = None

    def __post_init__(self) -> None:
        """Checks what comes from users.

        Raises:
            TypeError: the name is no text.
            ValueError: `sharding` is neither "global" nor "local".
        """
        if not isinstance(self.name, str):
            raise TypeError(f"a tap's name is a text, got {type(self.name).__name__} {self.name!r}")
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"sharding={self.sharding!r}, expected 'global' (the tap gets the whole array) or 'local' (each "
                "device's shard)"
            )


def bind_tap(
    arg: Any,
    result: Any,
    kwargs: dict[str, Any],
    make_sink: SinkFactory,
    *,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    """Binds one tap of `arg`.

    Args:
        arg: the pytree to send.
        result: what to return; the tapped `arg` if None.
        kwargs: host values for the sink; none may be traced.
        make_sink: makes the sink for given transformations.
        identity: everything the sink's behaviour depends on beside `kwargs` and the structure of `arg`.
        options: how it is emitted.

    Raises:
        TypeError: a leaf of `arg` cannot be sent, or a keyword argument is traced. The text names the user's line.
        Exception: what JAX or a pytree's own code raises, with a note that names the user's line.
    """

    def bind(spec: TapSpec, arrays: list[Any]) -> Any:
        outs = tap_p.bind(*arrays, tap=spec, transforms=(), float0_leaves=())
        return spec.structure.restore(arg, outs) if result is None else result

    return bind_spec(bind, arg, kwargs, make_sink, identity=identity, options=options)


def bind_spec(
    bind: Callable[[TapSpec, list[Any]], Any],
    arg: Any,
    kwargs: dict[str, Any],
    make_sink: SinkFactory,
    *,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    """What `bind` returns for the spec of a tap or a call and the arrays of `arg`; see `bind_tap` for the rest."""
    source_line = user_source_line()
    tap = f"{options.name} at {source_line}"
    late_rules.register_imported()
    try:
        arrays, structure = leaves.split_leaves(arg, "arg", tap, keep_objects=options.keep_objects)
        _check_kwargs(kwargs, options.name, tap)
        tangents = environment.TAP_TANGENTS.read() if options.tap_tangents is None else options.tap_tangents
        spec = TapSpec(
            name=options.name,
            source_line=source_line,
            kwargs=kwargs,
            ordered=options.ordered,
            tangents=tangents,
            transposed=tangents if options.tap_transposed is None else options.tap_transposed,
            sharding=options.sharding,
            device_index=options.device_index,
            kind=options.kind,
            params=options.params,
            check=options.check,
            folds=options.folds,
            without_devices=options.without_devices,
            structure=structure,
            identity=(*identity, structure.static_values),
            make_sink=make_sink,
        )
        spec = spec.intern()
        if options.place is not None:
            note_place(spec.places, options.place)
        return bind(spec, arrays)
    except Exception as error:
        if str(source_line) not in str(error):  # JAX's own errors, such as for a tracer that escaped
            error.add_note(f"This was raised in the tap {tap}")
        raise


def _check_kwargs(kwargs: dict[str, Any], name: str, tap: str) -> None:
    for key, value in kwargs.items():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"the keyword argument {key!r} of {name} is a traced value, {value!r}, and keyword arguments "
                "stay on the host: put it into the tapped pytree, such as id_tap(tap_func, {'x': x, 'step': step}) "
                f"(in the tap {tap})"
            )
