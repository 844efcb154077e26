"""Traces `print` and `log`: checks the format string and taps its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hostcallback.primitives.bind import bind_tap
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.sinks.print import Template
from hostcallback.receiver.wire import tap_descriptor
from hostcallback.receiver.wire.dtypes import Array
from hostcallback.tracing.format_check import check_format, placeholders
from hostcallback.tracing.source_line import user_source_line
from hostcallback.tracing.tap_options import TapOptions, check_switch


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
