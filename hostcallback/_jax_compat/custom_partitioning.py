"""The lowering of functions with `jax.experimental.custom_partitioning`, where JAX expects no effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import custom_partitioning as _custom_partitioning  # its primitive and its lowering rule
from jax._src.interpreters import mlir as _mlir  # register_lowering with the rule that JAX registers
from jax._src.lib.mlir import ir as _ir  # BoolAttr

custom_partitioning_p: Any = _custom_partitioning.custom_partitioning_p


def wrap_custom_partitioning(wrapper: Callable[[Any], Any]) -> None:
    """Replaces the lowering rule of functions with `jax.experimental.custom_partitioning`.

    Where the compiler partitions, JAX's rule (0.8 to 0.12) makes a call without side effects and sets no tokens. Later,
    while XLA compiles, it lowers what the function's `partition` returns, for a program without tokens, and keeps
    nothing alive of that. Without another rule, lowering fails for lack of a token if the function has taps.
    """
    _mlir.register_lowering(
        custom_partitioning_p, wrapper(_custom_partitioning._custom_partitioning_lowering_rule)
    )


def mark_side_effect(results: Sequence[Any]) -> None:
    """Keeps XLA from dropping the custom call that has these results, if it is one with any."""
    for result in results[:1]:
        result.owner.attributes["has_side_effect"] = _ir.BoolAttr.get(True)


def keeping_alive_in(ctx: Any, kept: list[Any]) -> Any:
    """The lowering context, with `kept` in the place of what JAX keeps alive as long as the program."""
    return ctx.replace(module_context=ctx.module_context.replace(keepalives=kept))
