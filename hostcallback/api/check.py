"""`check`: an assertion in device code. While it holds nothing is sent; when it fails its values are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.primitives.bind import bind_tap
from hostcallback.primitives.formatted import template_of
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.wire import tap_kind
from hostcallback.tracing.format_check import check_format
from hostcallback.tracing.source_line import user_place, user_source_line
from hostcallback.tracing.tap_options import TapOptions


def check(
    pred: Any,
    fmt: str,
    /,
    *args: Any,
    name: str = "check",
    devices: Sequence[jax.Device] | None = None,
    **kwargs: Any,
) -> None:
    """Checks on the device that all of `pred` holds: `check(jnp.isfinite(x), "x is {x} at step {}", step, x=x)`.

    Works in any traced code, and outside of it. While the check holds, nothing is sent and nobody waits: on CPU it is
    one branch. When it fails, `pred` and the arguments are sent with sequence number, time, run and device. The program
    goes on; the failures are gathered by line and raised together, as `CheckError` in a `TapFunctionException`, by
    `barrier_wait`, by the end of `outfeed_receiver` or `error_collector`, or as the receiver's `on_error` says.

    Under vmap there is one check of the whole batch, and the report says which elements failed. If vmap batches the
    predicate of a `cond`, JAX runs both branches for all elements, and with them the checks inside: put the condition
    into such a check, `check(~taken | ok, ...)`. Under jvp and grad the primals are checked, once. Where the compiler
    partitions `pred` over devices, each checks its own shard (and all of them what is replicated).

    Args:
        pred: boolean, of any shape.
        fmt: a format string, as `str.format` takes it. Not an f-string: the values are not known yet.
        *args: pytrees for its placeholders, traced or not.
        name: what the check is called in reports; `disable_checks` takes it.
        devices: the devices that check; all by default. Others of this process do not.
        **kwargs: as `args`, by name.

    Raises:
        TypeError: `pred` is not boolean, or `fmt` no text.
        ValueError: an argument is not used by `fmt`, or `fmt` is malformed.
        IndexError: `fmt` has more placeholders than there are `args`.
        KeyError: a placeholder's name is not among `kwargs`.
    """
    line = user_source_line()
    if not isinstance(fmt, str):
        raise TypeError(
            f"hcb.check takes a format string after the predicate, got {type(fmt).__name__} {fmt!r}: "
            f"hcb.check(x > 0, 'x is {{}}', x), at {line}"
        )
    predicate = _predicate(pred, line)
    check_format("hcb.check", fmt, args, kwargs)
    without = _without(devices, line)
    template = template_of(fmt, args, kwargs)

    options = TapOptions(
        name, tap_tangents=False, sharding="local", keep_objects=True, kind=tap_kind.CHECK, params=template.params(),
        without_devices=without, place=user_place(),
    )  # fmt: skip
    identity = ("check", fmt, str(template.printoptions))
    binding = Binding(objects={"template": template})
    bind_tap((predicate, tuple(args), dict(kwargs)), (), {}, binding, identity=identity, options=options)


def _predicate(pred: Any, line: Any) -> Any:
    found = (
        jnp.result_type(pred)
        if isinstance(pred, jax.Array | np.ndarray | np.generic | bool | int | float)
        else None
    )
    if found != jnp.bool_:
        shown = f"{found}{list(np.shape(pred))}" if found is not None else f"{type(pred).__name__} {pred!r}"
        raise TypeError(
            f"hcb.check's predicate is {shown}, expected booleans that hold when all is well, such as "
            f"jnp.isfinite(x) or x > 0, at {line}"
        )
    return jnp.asarray(pred)


def _without(devices: Sequence[jax.Device] | None, line: Any) -> tuple[int, ...]:
    if devices is None:
        return ()
    wanted = [devices] if isinstance(devices, jax.Device) else list(devices)
    wrong = [device for device in wanted if not isinstance(device, jax.Device)]
    if wrong:
        raise TypeError(
            f"hcb.check's devices are jax.Device, got {wrong!r}: jax.local_devices()[:1], at {line}"
        )
    return tuple(device.id for device in jax.local_devices() if device not in wanted)


def disable_checks(*names: str) -> None:
    """Switches checks off, in programs that run already and in those to come; nothing is compiled anew.

    Args:
        *names: of which checks, as `check(..., name=)` has them; of all if none is given.

    Raises:
        TypeError: a name is no text.
    """
    _switch(names, off=True)


def enable_checks(*names: str) -> None:
    """Switches checks on again: those of the names, or all."""
    _switch(names, off=False)


def _switch(names: Iterable[str], *, off: bool) -> None:
    names = list(names)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"the names of checks are texts, got {wrong!r}: as in hcb.check(..., name='loss')")
    if names:
        runtime.rule_table.set_named(runtime.registry, names, off=off)
    else:
        runtime.rule_table.set_all(runtime.registry, off=off)
