"""The queue of failed checks that the next call raises, while another thread takes its entry."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import hostcallback.api  # noqa: F401  (before the rooms below it, whose imports depend on its order)
from hostcallback import _jax_compat as compat
from hostcallback.primitives import effect_dispatch, effects
from hostcallback.receiver.failures import deferred_errors


class _Taken(list[Any]):
    """A queue whose only entry another thread takes after the look at it."""

    def __len__(self) -> int:
        return 1

    def __contains__(self, entry: object) -> bool:
        return True


def test_an_entry_that_another_thread_takes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_errors, "raise_soon_queue", _Taken())
    monkeypatch.setattr(effect_dispatch, "raise_soon_queue", _Taken())
    assert not deferred_errors.DeferredErrors(1).take_checks()
    effect_dispatch.raise_now()


class _Unnamed:
    """What a program shows that was traced from a function of which JAX knows no source."""

    class jaxpr:
        """Its jaxpr."""

        class debug_info:
            """Its debug info."""

            func_src_info = compat.UNKNOWN_FUNCTION


def test_a_compiled_program_has_the_name_that_is_not_noted() -> None:
    # Barriers call such programs: if the name were noted, a barrier would raise a check, and not wait.
    names: list[str] = []
    undo = compat.call_after_each_jit(lambda function: names.append(compat.source_of(function)))
    try:
        compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
        for _ in range(3):
            compiled(1.0)
    finally:
        undo()
    assert names[-1] == compat.UNKNOWN_FUNCTION
    effects.note_program(_Unnamed)
    assert compat.UNKNOWN_FUNCTION not in effects.tapped_functions
