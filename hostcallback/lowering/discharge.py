"""What happens to each program where JAX lowers it: it gets its X-ray taps, and the effects of all taps are discharged.

Any JAX effect of a program takes each of its calls off JAX's C++ dispatch path (100 us and more instead of 5). Here a
program with taps becomes one equation without their effects, whose lowering makes the token, threads it through the
taps and drops it at the end. Programs without taps, for which no X-ray is on, are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jax.sharding import Sharding

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import ClosedJaxpr, LoweringRuleContext
from hostcallback.primitives.effects import TapEffect, note_program
from hostcallback.receiver import environment
from hostcallback.receiver.log import logger

why_not = ""
"""What keeps X-ray from rewriting programs; empty where nothing does."""

keep_only_result: Any = None
"""Set by `lowering.only_result`, which is loaded with the taps; see there."""

boundary_p = compat.Primitive("tap_boundary")
"""A whole program with taps, `closed`: never bound, only lowered."""
boundary_p.multiple_results = True


def _other_effects(closed: ClosedJaxpr) -> set[Any]:
    return {effect for effect in closed.effects if not isinstance(effect, TapEffect)}


def _abstract(*avals: Any, closed: ClosedJaxpr) -> Any:
    return closed.out_avals, _other_effects(closed)


def _lower(ctx: LoweringRuleContext, *args: Any, closed: ClosedJaxpr) -> Any:
    return compat.lower_discharged(ctx, closed, args, TapEffect, keep_only_result)


def discharge(closed: ClosedJaxpr, inner: ClosedJaxpr) -> Any:
    """Returns a program that runs `inner` without its tap effects, with the inputs and results of `closed`."""
    if compat.has_effect(inner, TapEffect):
        note_program(closed)
    return compat.as_one_equation(closed, inner, boundary_p, _other_effects(inner))


def rewrite(
    closed: ClosedJaxpr,
    name: str,
    donated: Sequence[bool],
    shardings: Sequence[Sharding | None],
    devices: int,
) -> Any:
    """Returns what JAX lowers in place of a program; the same object if it has no taps and no X-ray is on.

    Args:
        closed: the program.
        name: of its module, such as `jit(step)`.
        donated: for each input, whether the program may take its memory.
        shardings: for each input, its sharding; None where the compiler decides.
        devices: the number of devices that it is for.
    """
    xray = sys.modules.get("hostcallback.lowering.xray")  # `import hostcallback` does not load it
    if xray is not None and (tapped := xray.tapped(closed, name, donated, shardings, devices)) is not None:
        return discharge(closed, tapped)
    if not compat.has_effect(closed, TapEffect) or not environment.FAST_DISPATCH.read():
        return closed
    return discharge(closed, compat.constants_to_inputs(closed)[0])


def install() -> bool:
    """Begins to rewrite programs. Returns False if this JAX version is not known, or fast dispatch is switched off.

    Taps work in both cases. X-ray needs a JAX that is known.

    Raises:
        ValueError: `HOSTCALLBACK_FAST_DISPATCH` is neither 0 nor 1.
    """
    try:
        compat.wrap_outermost_lowering(rewrite)
    except LookupError as error:
        global why_not
        why_not = f"programs cannot be rewritten where this JAX lowers them: {error}. Update hostcallback"
        logger.warning(
            "calls of programs with taps take JAX's slow path, about 100 us instead of 5, since this JAX is not known: "
            "%s. Messages arrive as always. Update hostcallback, or silence this with %s=0",
            error,
            environment.FAST_DISPATCH,
        )
        return False
    return bool(environment.FAST_DISPATCH.read())


boundary_p.def_effectful_abstract_eval(_abstract)
compat.register_lowering(boundary_p, _lower)
installed = install()
"""Whether programs with taps are dispatched as fast as programs without taps."""
