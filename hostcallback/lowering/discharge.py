"""Discharges the tap effects of whole programs when JAX lowers them, so that taps cost no dispatch time.

Any JAX effect of a program takes each of its calls off JAX's C++ dispatch path (100 us and more instead of 5). Here a
program with taps becomes one equation without their effects, whose lowering makes the token, threads it through the
taps and drops it at the end. Programs without taps are left alone.
"""

from __future__ import annotations

from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.primitives.effects import TapEffect
from hostcallback.receiver import environment
from hostcallback.receiver.log import logger

boundary_p = compat.Primitive("tap_boundary")
"""A whole program with taps, `closed`: never bound, only lowered."""
boundary_p.multiple_results = True


def _other_effects(closed: Any) -> set[Any]:
    return {effect for effect in closed.effects if not isinstance(effect, TapEffect)}


def _abstract(*avals: Any, closed: Any) -> Any:
    return closed.out_avals, _other_effects(closed)


def _lower(ctx: Any, *args: Any, closed: Any) -> Any:
    return compat.lower_discharged(ctx, closed, args, TapEffect)


def discharge(closed: Any) -> Any:
    """Returns the program without its tap effects; the same object if it has none."""
    if not compat.has_effect(closed, TapEffect):
        return closed
    from hostcallback.lifecycle import raise_soon

    raise_soon.note_program(closed)
    return compat.as_one_equation(closed, boundary_p, _other_effects(closed))


def install() -> bool:
    """Begins to discharge. Returns False if that is switched off or this JAX version is not known.

    Taps work in both cases.

    Raises:
        ValueError: `HOSTCALLBACK_FAST_DISPATCH` is neither 0 nor 1.
    """
    if not environment.FAST_DISPATCH.read():
        return False
    try:
        compat.wrap_outermost_lowering(discharge)
    except LookupError as error:
        logger.warning(
            "calls of programs with taps take JAX's slow path, about 100 us instead of 5, since this JAX is not known: "
            "%s. Messages arrive as always. Update hostcallback, or silence this with %s=0",
            error,
            environment.FAST_DISPATCH,
        )
        return False
    return True


boundary_p.def_effectful_abstract_eval(_abstract)
compat.register_lowering(boundary_p, _lower)
installed = install()
"""Whether programs with taps are dispatched as fast as programs without taps."""
