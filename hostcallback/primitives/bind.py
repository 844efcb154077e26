"""Binds a tap at trace time: splits its argument into leaves and binds one tap equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostcallback.primitives import late_rules
from hostcallback.primitives.tap import tap_p
from hostcallback.receiver.failures.call_site import note_place
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.tracing import leaves
from hostcallback.tracing.format_check import check_kwargs
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import TapOptions
from hostcallback.tracing.tap_spec import TapSpec


def bind_tap(
    arg: Any,
    result: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    *,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    """Binds one tap of `arg`.

    Args:
        arg: the pytree to send.
        result: the value to return; the tapped `arg` if None.
        kwargs: host values for the sink; none may be traced.
        binding: the functions and objects that take its messages in this process.
        identity: all values that determine the sink's behaviour, except `kwargs` and the structure of `arg`.
        options: the options of the tap.

    Raises:
        TypeError: a leaf of `arg` cannot be sent, or a keyword argument is traced. The text names the user's line.
        Exception: an error of JAX or of a pytree's code, with a note that names the user's line.
    """

    def bind(spec: TapSpec, arrays: list[Any]) -> Any:
        outs = tap_p.bind(*arrays, tap=spec, transforms=(), float0_leaves=())
        return spec.structure.restore(arg, outs) if result is None else result

    return bind_spec(bind, arg, kwargs, binding, identity=identity, options=options)


def bind_spec(
    bind: Callable[[TapSpec, list[Any]], Any],
    arg: Any,
    kwargs: dict[str, Any],
    binding: Binding,
    *,
    identity: tuple[Any, ...],
    options: TapOptions,
) -> Any:
    """Calls `bind` with the spec of a tap or call and the arrays of `arg`, and returns its result; see `bind_tap`."""
    source_line = user_source_line()
    tap = f"{options.name} at {source_line}"
    # Here, since the rules of a module that was imported meanwhile must be there before the tap is bound.
    late_rules.register_imported()
    try:
        arrays, structure = leaves.split_leaves(arg, "arg", tap, keep_objects=options.keep_objects)
        check_kwargs(kwargs, options.name, tap)
        spec = TapSpec(
            options.resolved(),
            source_line=source_line,
            kwargs=kwargs,
            structure=structure,
            identity=(*identity, structure.static_values),
            binding=binding,
        )
        spec = spec.intern()
        if options.place is not None:
            note_place(spec.places, options.place)
        return bind(spec, arrays)
    except Exception as error:
        if str(source_line) not in str(error):  # errors of JAX, such as for a leaked tracer
            error.add_note(f"This was raised in the tap {tap}")
        raise
