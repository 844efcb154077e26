"""The effects of taps and calls, because of which JAX neither drops nor reorders taps, and their discharge.

JAX must know the classes when it reads an exported program, so `import hostcallback` loads this module. The module
`effect_dispatch` has what is due when JAX dispatches a program with taps: it hears of that by the hash of an effect.

Any JAX effect of a program takes each of its calls off JAX's C++ dispatch path (100 us and more instead of 5). So where
JAX lowers a program with taps, `rewrite` replaces it by one equation without their effects, whose lowering makes the
token, threads it through the taps and drops it at the end. X-ray adds its taps there. Other programs are left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Sharding

from hostcallback import _jax_compat as compat
from hostcallback.receiver import environment
from hostcallback.receiver.log import logger

load_api: Callable[[], object] | None = None
"""Loads what taps of this process load: the rules of all primitives, the exit handler. `hostcallback` sets it."""

before_dispatch: Callable[[], None] | None = None
"""Called before a dispatch, and at other times; set while a program may fail or a failed check may be raised soon."""

before_call: Callable[[], None] | None = None
"""Called before a dispatch of a program with calls, and at other times."""

add_taps: Callable[..., compat.ClosedJaxpr | None] | None = None
"""Returns a program with the taps of the X-rays that are on, for the arguments of `rewrite`; None if it gets none.
`lowering.xray` sets it, which `import hostcallback` does not load."""

apart: Callable[[], AbstractContextManager[object]] | None = None
"""Opens a block for the host function of a call, whose programs get no taps of the X-rays around the one that waits for
it. `lowering.xray` sets it too."""

look_at_exported: Callable[[compat.ClosedJaxpr, str], None] | None = None
"""Called with a program that is exported, and its name. `lowering.xray` sets it too."""

keep_only_result: Any = None
"""Set by `lowering.emission`, which is loaded with the taps; see there."""

group_checks: Callable[[compat.LoweringContext, compat.ClosedJaxpr], compat.ClosedJaxpr] | None = None
"""Groups the checks of a program that is about to be lowered. Set by `lowering.check_groups`, loaded with checks."""

forget_failures: Callable[[], None] | None = None
"""Called when a thread has waited for its programs and their errors were reported; set while a program may fail."""

tapped_functions: set[str] = set()
"""Names and source lines of functions whose programs have taps."""


def note_program(closed: compat.ClosedJaxpr) -> None:
    """Notes that the function from which a program was traced has taps."""
    name = compat.traced_function(closed)
    # Programs that are compiled ahead of time have no name: so have those of a barrier, which must not raise.
    if name is not None and name != compat.UNKNOWN_FUNCTION:
        tapped_functions.add(name)


class TapEffect(compat.Effect):
    """Keeps JAX from dropping taps. Only its subclasses are instantiated.

    The lowering of a whole program removes the effect (see `discharge`). If that is off, JAX hashes the effect
    at each dispatch of a program that has it.
    """

    def __str__(self) -> str:
        """The name in printed jaxprs."""
        return "Tap"

    def __eq__(self, other: object) -> bool:
        """All instances of one class are equal."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        """Returns one value for all, after the work that is due before a dispatch."""
        if before_dispatch is not None:
            before_dispatch()
        return 0x746170  # not an address: JAX sorts some effects by hash, and programs must be equal in all processes


class _StartingTapEffect(TapEffect):
    """Also starts the receivers of exported taps.

    JAX creates an instance, without arguments, for each exported program that it reads. By that instance this process
    learns of taps that it did not lower: their receivers start when JAX first hashes it, before it calls the program.
    """

    def __init__(self, *, traced_here: bool = False) -> None:
        """Makes the effect; `traced_here`: for taps that this process traced."""
        self._traced_here = traced_here

    def __hash__(self) -> int:
        """Returns the base class's value, after starting the receivers of exported taps."""
        if not self._traced_here:
            if load_api is not None:
                load_api()
            from hostcallback.lifecycle import receivers
            from hostcallback.sync import inflight

            receivers.start(jax.default_backend())
            inflight.expect(jax.local_devices())
        return super().__hash__()


class ThreadedTapEffect(_StartingTapEffect):
    """Also keeps taps in order, by the token that JAX passes from one tap to the next."""


class RegionTapEffect(_StartingTapEffect):
    """The effect of taps in regions that tokens must not enter; see `tap.effect_here`."""


class PassedTokenEffect(TapEffect):
    """Keeps JAX from dropping the token of `ThreadedTapEffect`; each tap has both effects.

    From its second call on, the result of `lower().compile()` uses JAX's fast dispatch, which passes no tokens (JAX 0.8
    to 0.12). A program with an unordered effect, such as this one, does not use it.
    """


class CallEffect(TapEffect):
    """The additional effect of programs with calls. Its token is not used.

    It exists for its hash: JAX computes it at each dispatch of such a program, and a dispatch with a call may fail.
    """

    def __hash__(self) -> int:
        """Returns the base class's value, after preparing for a program that may fail."""
        value = super().__hash__()
        if before_call is not None:
            before_call()
        return value


TAP_EFFECT = ThreadedTapEffect(traced_here=True)
REGION_TAP_EFFECT = RegionTapEffect(traced_here=True)
PASSED_TOKEN_EFFECT = PassedTokenEffect()
CALL_EFFECT = CallEffect()
compat.register_effect(ThreadedTapEffect, ordered=True)
compat.register_effect(CallEffect, ordered=True)
compat.register_effect(RegionTapEffect, ordered=False)
compat.register_effect(PassedTokenEffect, ordered=False)

# ---- Their discharge, where JAX lowers a whole program --------------------------------------------------------------

why_not = ""
"""What keeps X-ray from rewriting programs; empty where nothing does."""

boundary_p = compat.Primitive("tap_boundary")
"""A whole program with taps, `closed`: never bound, only lowered."""
boundary_p.multiple_results = True


def _other_effects(closed: compat.ClosedJaxpr) -> set[compat.Effect]:
    return {effect for effect in closed.effects if not isinstance(effect, TapEffect)}


def _abstract(*avals: compat.Aval, closed: compat.ClosedJaxpr) -> Any:
    return closed.out_avals, _other_effects(closed)


def _lower(ctx: compat.LoweringRuleContext, *args: Any, closed: compat.ClosedJaxpr) -> Any:
    if group_checks is not None:
        closed = group_checks(compat.LoweringContext(ctx), closed)
    return compat.lower_discharged(ctx, closed, args, TapEffect, keep_only_result)


def discharge(closed: compat.ClosedJaxpr, inner: compat.ClosedJaxpr) -> Any:
    """Returns a program that runs `inner` without its tap effects, with the inputs and results of `closed`."""
    if compat.has_effect(inner, TapEffect):
        note_program(closed)
    return compat.as_one_equation(closed, inner, boundary_p, _other_effects(inner))


def rewrite(
    closed: compat.ClosedJaxpr,
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
    if add_taps is not None and (tapped := add_taps(closed, name, donated, shardings, devices)) is not None:
        return discharge(closed, tapped)
    if not compat.has_effect(closed, TapEffect) or not environment.FAST_DISPATCH.read():
        return closed
    return discharge(closed, compat.constants_to_inputs(closed)[0])


def _look(closed: compat.ClosedJaxpr, name: str) -> None:
    if look_at_exported is not None:
        look_at_exported(closed, name)


@functools.cache  # once for each name
def _tell_unplaced(name: str) -> None:
    logger.warning(
        "hcb.observe, hcb.watch_nonfinite and hcb.capsule do nothing in the program %s: its devices, which may be "
        "those of several processes, are not known where it is lowered. Lower it within the jax.set_mesh(mesh) in "
        "which it was traced, or give its jit in_shardings or out_shardings", name,
    )  # fmt: skip


def install() -> bool:
    """Begins to rewrite programs. Returns False if this JAX version is not known, or fast dispatch is switched off.

    Taps work in both cases. X-ray needs a JAX that is known.

    Raises:
        ValueError: `HOSTCALLBACK_FAST_DISPATCH` is neither 0 nor 1.
    """
    try:
        compat.wrap_outermost_lowering(rewrite, _look, _tell_unplaced)
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
