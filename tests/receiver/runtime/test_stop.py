"""What a request to stop can be heard by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.runtime.cells import cells
from hostcallback.receiver.runtime.stop import BEGUN, ENDED, SPEC, stop_request


def test_a_request_is_heard_once_a_program_that_asks_for_it_was_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spec in (SPEC, BEGUN, ENDED):  # as in a new process
        monkeypatch.delitem(cells, spec.name, raising=False)
    assert stop_request.unheard() == (
        "no program with a loop with stop=True, or with hcb.stop_requested, was traced yet"
    )
    jax.jit(lambda x: jnp.where(hcb.stop_requested(), 0, x)).lower(1.0)
    assert stop_request.unheard() == ""
