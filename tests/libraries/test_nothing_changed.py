"""X-ray changes nothing: the same parameters, Python state, losses and number of traces as the bare training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import hostcallback as hcb
from training_programs import (
    PROGRAMS,
    Trained,
    automatic_sharding,
    equinox,
    haiku,
    linen,
    nnx,
    ode,
    sharded_by_hand,
    svi,
    transformer,
)

PLACES = {
    nnx: ["first", "second"],
    linen: ["Dense_0", "Dense_1"],
    equinox: ["mlp/layers/*"],
    haiku: ["mlp/~/linear_*"],
    transformer: ["attention", "mlp"],
    automatic_sharding: ["attention", "mlp"],
    sharded_by_hand: ["attention", "mlp"],
    svi: ["primitive:dot_general"],
    ode: ["field"],
}
PARAMETERS = {
    nnx: "**/kernel",
    linen: "params/params/Dense_0/kernel",
    equinox: "mlp/layers[0].weight",
    haiku: "mlp/~/linear_0/w",
    transformer: "layers/**",
    automatic_sharding: "layers/**",
    sharded_by_hand: "layers/**",
    svi: "state/**",
    ode: "rate",
}


@functools.cache
def bare(program: Callable[..., Trained]) -> Trained:
    return program(lambda step: step)


def in_context(program: Callable[..., Trained], context: Any) -> Trained:
    with hcb.outfeed_receiver():
        with context:
            trained = program(lambda step: step)
        hcb.barrier_wait()
    return trained


def observing(program: Callable[..., Trained], what_of: list[str], tap_func: Any) -> Any:
    where = PARAMETERS[program] if "param" in what_of[0] or "update" in what_of else PLACES[program]
    return {"where": where, "what": ["norm"], "what_of": what_of, "tap_func": tap_func}


# On the callback transport the statistics are XLA's reductions, which it fuses with what they measure: there the last
# bits of one of these programs, svi, differ.
@pytest.mark.native_only
@pytest.mark.slow_variants(every=9)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    "what_of",
    [["output", "input"], ["output", "grad"], ["param", "param grad", "update"]],
    ids=lambda names: names[-1],
)
def test_an_observed_training_is_the_bare_one(program: Any, what_of: list[str]) -> None:
    messages: list[Any] = []
    trained = in_context(program, hcb.observe(**observing(program, what_of, messages.append)))
    assert len(messages) >= len(trained.losses)  # more where there are loops, or before the training
    norms = [float(np.max(value["norm"])) for value in messages[-1].values()]
    assert norms
    assert np.isfinite(norms).all()
    assert not bare(program).differences(trained)


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("program", [nnx, equinox, linen], ids=lambda program: program.__name__)
def test_wrapped_outside_of_the_jit_the_training_is_the_bare_one(program: Any) -> None:
    messages: list[Any] = []
    options = observing(program, ["output", "grad"], messages.append)
    with hcb.outfeed_receiver():
        trained = program(lambda step: hcb.observe(step, **options))
        hcb.barrier_wait()
    assert len(messages) == len(trained.losses)
    assert not bare(program).differences(trained)


def test_wrapped_inside_of_nnx_jit_the_training_is_the_bare_one(monkeypatch: Any) -> None:
    flax_nnx = pytest.importorskip("flax.nnx")
    messages: list[Any] = []
    options = observing(nnx, ["output", "grad"], messages.append)
    real = flax_nnx.jit
    monkeypatch.setattr(flax_nnx, "jit", lambda step: real(hcb.observe(step, **options)))
    with hcb.outfeed_receiver():
        trained = nnx(lambda step: step)
        hcb.barrier_wait()
    assert len(messages) == len(trained.losses)
    assert not bare(nnx).differences(trained)
    assert trained.calls == 1


def test_the_plain_program_is_kept_apart_from_the_observed_one() -> None:
    messages: list[Any] = []
    step = jax.jit(lambda x: jax.named_scope("here")(jax.numpy.sin)(x) + 1)
    context = hcb.observe(where="here", tap_func=messages.append)
    with hcb.outfeed_receiver():
        step(1.0)
        for _ in range(2):
            with context:
                step(1.0)
            step(1.0)
        hcb.barrier_wait()
    assert len(messages) == 2
