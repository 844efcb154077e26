"""The effects of taps and calls: because of them JAX neither drops nor reorders taps.

JAX must know the classes when it reads an exported program, so `import hostcallback` loads this module. The module
`effect_dispatch` has what is due when JAX dispatches a program with taps: it hears of that by the hash of an effect.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from hostcallback import _jax_compat as compat
from hostcallback._jax_compat.types import ClosedJaxpr

load_api: Callable[[], object] | None = None
"""Loads what taps of this process load: the rules of all primitives, the exit handler. `hostcallback` sets it."""

before_dispatch: Callable[[], None] | None = None
"""Called before a dispatch, and at other times; set while a program may fail or a failed check may be raised soon."""

before_call: Callable[[], None] | None = None
"""Called before a dispatch of a program with calls, and at other times."""

forget_failures: Callable[[], None] | None = None
"""Called when a thread has waited for its programs and their errors were reported; set while a program may fail."""

tapped_functions: set[str] = set()
"""Names and source lines of functions whose programs have taps."""


def note_program(closed: ClosedJaxpr) -> None:
    """Notes that the function from which a program was traced has taps."""
    name = compat.traced_function(closed)
    # Programs that are compiled ahead of time have no name: so have those of a barrier, which must not raise.
    if name is not None and name != compat.UNKNOWN_FUNCTION:
        tapped_functions.add(name)


class TapEffect(compat.Effect):  # type: ignore[misc]
    """Keeps JAX from dropping taps. Only its subclasses are instantiated.

    The lowering of a whole program removes the effect (see `lowering.discharge`). If that is off, JAX hashes the effect
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


class ThreadedTapEffect(TapEffect):
    """Also keeps taps in order, by the token that JAX passes from one tap to the next.

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


class RegionTapEffect(TapEffect):
    """The effect of taps in regions that tokens must not enter; see `tap._effect`."""


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
REGION_TAP_EFFECT = RegionTapEffect()
PASSED_TOKEN_EFFECT = PassedTokenEffect()
CALL_EFFECT = CallEffect()
compat.register_effect(ThreadedTapEffect, ordered=True)
compat.register_effect(CallEffect, ordered=True)
compat.register_effect(RegionTapEffect, ordered=False)
compat.register_effect(PassedTokenEffect, ordered=False)
