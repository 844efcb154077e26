"""JAX's own callbacks, which `accelerate` takes over where they are bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import (
    callback as _callback,  # io_callback_p, _FlatCallback
    debugging as _debugging,  # debug_callback_p, debug_print_p, their effects
    effects as _effects,  # ordered_effects
)

_CALLBACKS: dict[str, tuple[Any, str, frozenset[str], frozenset[str]]] = {
    "jax.debug.callback": (
        _debugging, "debug_callback_p", frozenset({"callback", "effect", "partitioned"}), frozenset()
    ),
    "jax.debug.print": (
        _debugging, "debug_print_p",
        frozenset({"fmt", "ordered", "partitioned", "in_tree", "static_args", "np_printoptions", "has_placeholders"}),
        frozenset({"logging_record"}),  # from 0.10 on: `jax.debug.log`
    ),
    "io_callback": (
        _callback, "io_callback_p", frozenset({"callback", "result_avals", "sharding", "ordered"}), frozenset()
    ),
}  # fmt: skip
# By name: where the primitive is, and the parameters of its equations: in all versions, and in some (0.8 to 0.12).


def callback_primitive(name: str) -> Any:
    """The primitive in which every call of that public function ends, wherever a library got the function from.

    Raises:
        LookupError: this JAX has none of that name.
    """
    module, attribute, _, _ = _CALLBACKS[name]
    primitive = getattr(module, attribute, None)
    if not callable(getattr(primitive, "bind", None)):
        raise LookupError(f"{module.__name__} has no primitive {attribute}")
    return primitive


def check_callback_params(name: str, params: dict[str, Any]) -> None:
    """Raises LookupError where an equation of that primitive has parameters that this code does not know."""
    _, attribute, always, sometimes = _CALLBACKS[name]
    if not always <= set(params) <= always | sometimes:
        known = ", ".join(sorted(always | sometimes))
        raise LookupError(f"{attribute} has the parameters {', '.join(sorted(params))}, expected {known}")


def replace_bind(primitive: Any, bind: Callable[..., Any]) -> None:
    """Has `primitive.bind(...)` call `bind`.

    Every way to the primitive goes through it, tracing as well as the evaluation of a jaxpr (0.8 to 0.12). To replace
    the public functions instead would miss the libraries that imported them before.
    """
    primitive.bind = bind  # hides the method of the class


def restore_bind(primitive: Any, bind: Callable[..., Any]) -> None:
    """Undoes `replace_bind`, unless other code has replaced it since: that one calls ours, which hands on."""
    if vars(primitive).get("bind") is bind:
        del primitive.bind


def own_bind(primitive: Any) -> Callable[..., Any]:
    """What `primitive.bind` is now."""
    bind: Callable[..., Any] = primitive.bind
    return bind


def is_ordered_debug_effect(effect: Any) -> bool:
    """Whether a debug callback with this effect keeps program order."""
    return bool(_effects.ordered_effects.contains(effect))


def is_debug_effect(effect: Any) -> bool:
    """Whether an effect is that of `jax.debug.callback` or `jax.debug.print`."""
    return isinstance(effect, (_debugging.DebugEffect, _debugging.OrderedDebugEffect))


def callback_parts(flat: Any) -> tuple[Callable[..., Any], Any, dict[int, Any]]:
    """The user's function in a callback primitive's `callback`; the tree of its (args, kwargs); its static leaves.

    `_FlatCallback` of `io_callback`; for `debug_callback`, a closure over the three (0.8 to 0.12).

    Raises:
        LookupError: it is neither.
    """
    if isinstance(flat, _callback._FlatCallback):
        return flat.callback_func, flat.in_tree, {}
    names = getattr(getattr(flat, "__code__", None), "co_freevars", ())
    if set(names) != {"callback", "in_tree", "static_args"}:
        raise LookupError("its callback is not made as jax.debug.callback makes it")
    # The callback is a closure without public attributes: its cells are the only way to the user's function
    # (0.8 to 0.12).
    cells = {name: cell.cell_contents for name, cell in zip(names, flat.__closure__, strict=True)}
    return cells["callback"], cells["in_tree"], dict(cells["static_args"])


def debug_logger() -> Any:
    """The logger of `jax.debug.log`."""
    return _debugging.logger
