"""Binds a tap at trace time: splits its argument into leaves, checks a format string, and binds one equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hostcallback.primitives import late_rules
from hostcallback.primitives.tap import tap_p
from hostcallback.receiver.failures.call_site import note_place
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.print import Template
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.tracing import leaves
from hostcallback.tracing.format_check import check_format, check_kwargs, placeholders
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_spec import TapOptions, TapSpec, check_switch


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


def emit_text(
    what: str,
    fmt: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    skip_format_check: bool,
    identity: tuple[Any, ...],
    objects: Mapping[str, Any],
    options: TapOptions,
) -> None:
    """Binds one tap of `args` and `kwargs`, which the host formats as a text.

    Args:
        what: name of the caller, for errors.
        fmt: the format string.
        args: values of its placeholders; may be traced.
        kwargs: values of its named placeholders; may be traced.
        skip_format_check: whether arguments may lack a placeholder.
        identity: all values that determine `objects`.
        objects: consumer of the texts, an output stream or a logger, by its name in the sink of that kind.
        options: the options of the tap.

    Raises:
        TypeError: `fmt` is not a text.
        ValueError: see `check_format`; or there are keyword arguments and no placeholders.
        IndexError: see `check_format`.
        KeyError: see `check_format`.
    """
    if not isinstance(fmt, str):
        raise TypeError(
            f"{what} takes a format string first, got {type(fmt).__name__} {fmt!r}: {what}('{{}}', x), at "
            f"{user_source_line()}"
        )
    check_switch("skip_format_check", skip_format_check)
    if not skip_format_check:
        check_format(what, fmt, args, kwargs)
    template = template_of(fmt, args, kwargs)
    if kwargs and not template.has_placeholders:
        raise ValueError(
            f"the format string {fmt!r} has no placeholders and {what} got keyword arguments {[*kwargs]}: pass them "
            f"by position to have them follow the text, at {user_source_line()}"
        )

    identity = (*identity, fmt, str(template.printoptions))
    options = replace(options, kind=tap_descriptor.FORMAT, params={**options.params, **template.params()})
    binding = Binding(objects={**objects, "template": template})
    bind_tap((tuple(args), dict(kwargs)), (), {}, binding, identity=identity, options=options)


def template_of(fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Template:
    """Returns the template for these arguments, with the current print options of numpy."""
    fields = list(placeholders(fmt))
    # Arrays of numpy and JAX have the same format, but other attributes, elements and reprs (which containers show).
    alike = all(field.replace("_", "").isalnum() or not field for field in fields)
    alike = alike and jax.tree_util.all_leaves([*args, *kwargs.values()]) and bool(fields or not args)
    return Template(fmt, bool(fields), np.get_printoptions(), None if alike else as_jax_array)


def as_jax_array(array: Array) -> Any:
    """Converts an array of a message into a JAX array on the CPU with the same dtype, as JAX's callbacks get it."""
    with jax.enable_x64(True):  # the receiver thread's setting may differ from the tracing thread's
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
