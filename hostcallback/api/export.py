"""`bind`, `unbind`, `export_checks`: taps of programs that `jax.export` writes and another process runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.export

from hostcallback.lowering import embedded
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.sinks.factory import Binding
from hostcallback.receiver.tap_arguments import refuse_async
from hostcallback.tracing.source_line import public


@public
def bind(name: str, func: Callable[..., Any], **kwargs: Any) -> None:
    """Delivers the taps with a given name, in exported programs that this process runs, to `func`.

    Such a program has no Python functions: its taps find their consumers by name, the `name=` of the tap or else the
    name of its function. `func` is called as the tap's function would be, see `id_tap`, with fresh numpy arrays in
    their containers; a container of a class of the program's own arrives as a `hostcallback.receiver.Node`, an object
    that stayed on
    its host as a `hostcallback.receiver.Opaque`, a typed PRNG key as its data. Taps of `id_print`, `print` and `log`
    print and log without a binding, and checks that fail are reported; a function that is bound to a check gets the
    arguments of its text. Taps to which nothing is bound are reported by `barrier_wait` and at the
    receiver's end.

    Args:
        name: name of the taps.
        func: called as `func(arg, **kwargs)`, on the receiver thread of the emitting device.
        **kwargs: added to the tap's own keyword arguments, of which plain data is exported; they win over those.

    Raises:
        TypeError: `name` is not a text, or `func` is not callable.

    Example:
        hcb.bind("loss", lambda loss: print(loss))
    """
    if not isinstance(name, str):
        raise TypeError(
            f"bind takes the name of a tap first, got {type(name).__name__} {name!r}: bind('loss', func)"
        )
    if not callable(func):
        raise TypeError(
            f"bind takes a function to call on the host, got {type(func).__name__} {func!r}: bind({name!r}, func)"
        )
    refuse_async(func, f"hcb.bind({name!r})")
    runtime.exported.bind(name, Binding(func, kwargs))


@public
def unbind(name: str) -> None:
    """Removes the binding of a name; ignores unknown names. Any thread.

    Later messages of that name are handled as before `bind`: printing taps print, and messages of taps with functions
    are counted and reported as an `UnboundConsumerError`.

    Args:
        name: the name given to `bind`.

    Example:
        hcb.unbind("loss")
    """
    runtime.exported.bind(name, None)


def export_checks() -> list[Any]:
    """Returns the safety checks of `jax.export` to disable for a program with taps.

    JAX exports only custom calls that it knows to be stable. The custom calls of taps are stable too, because they
    carry a versioned format (docs/wire-format.md).

    Returns:
        A list of `jax.export.DisabledSafetyCheck`, for the argument `disabled_checks` of `jax.export.export`.

    Example:
        jax.export.export(jax.jit(f), disabled_checks=hcb.export_checks())(x)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in embedded.TARGETS]
