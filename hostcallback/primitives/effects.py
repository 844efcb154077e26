"""The effects of taps and calls, by which JAX keeps them and orders them.

JAX must know them when it reads an exported program, and so they are imported with `hostcallback` itself. What else
they need is imported when JAX first looks at one.
"""

from __future__ import annotations

import importlib

import jax

from hostcallback import _jax_compat as compat


class TapEffect(compat.Effect):  # type: ignore[misc]
    """Keeps taps alive. Only its subclasses are instantiated.

    Whole programs lose it when they are lowered (see `lowering.discharge`). Where that is off, JAX hashes it whenever
    it dispatches a program that has it.
    """

    def __str__(self) -> str:
        """As jaxprs print it."""
        return "Tap"

    def __eq__(self, other: object) -> bool:
        """All tap effects of one kind are one."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        """One value for all, after what is to be done before a dispatch."""
        from hostcallback.lifecycle import effect_dispatch

        effect_dispatch.before_dispatch()
        return 0x746170  # not by address: JAX orders some effects by their hash, and programs must not vary


class ThreadedTapEffect(TapEffect):
    """Keeps taps in order as well, through the token that JAX threads for it.

    JAX makes another one, without arguments, for each exported program that it reads: so this process learns of taps
    that it never lowered. It starts their receivers when JAX first looks at the effect, to call the program.
    """

    def __init__(self, *, traced_here: bool = False) -> None:
        """`traced_here` tells the effect of this process's own taps."""
        self._traced_here = traced_here

    def __hash__(self) -> int:
        """As the base class's."""
        if not self._traced_here:
            importlib.import_module("hostcallback.api")  # as for taps of this process: the exit handler
            from hostcallback.lifecycle import receivers
            from hostcallback.sync import inflight

            receivers.start(jax.default_backend())
            inflight.expect(jax.local_devices())
        return super().__hash__()


class RegionTapEffect(TapEffect):
    """The effect of taps in regions where a token may not be passed; see `tap._effect`."""


class PassedTokenEffect(TapEffect):
    """An effect in addition to `ThreadedTapEffect`, which keeps JAX from dropping that effect's token.

    What `lower().compile()` returns goes through JAX's fast dispatch from its second call on, without tokens (0.8 to
    0.12), unless the program has an effect that is not ordered.
    """


class CallEffect(TapEffect):
    """An effect of programs with calls, in addition to `ThreadedTapEffect`. Its token is not used.

    It exists because JAX hashes it when it dispatches such a program, which may fail.
    """

    def __hash__(self) -> int:
        """As the base class's, after noting the call."""
        from hostcallback.lifecycle import effect_dispatch

        value = super().__hash__()
        effect_dispatch.before_call()
        return value


TAP_EFFECT = ThreadedTapEffect(traced_here=True)
REGION_TAP_EFFECT = RegionTapEffect()
PASSED_TOKEN_EFFECT = PassedTokenEffect()
CALL_EFFECT = CallEffect()
compat.register_effect(ThreadedTapEffect, ordered=True)
compat.register_effect(CallEffect, ordered=True)
compat.register_effect(RegionTapEffect, ordered=False)
compat.register_effect(PassedTokenEffect, ordered=False)
