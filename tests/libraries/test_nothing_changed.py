"""X-ray changes nothing: the same parameters, Python state, losses and number of traces as the bare training."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import hostcallback as hcb
from training_programs import (
    BATCHES,
    PROGRAMS,
    Batch,
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

Program = Callable[..., Trained]

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
    linen: "params/Dense_0/kernel",
    equinox: "mlp/layers[0].weight",
    haiku: "mlp/~/linear_0/w",
    transformer: "layers/**",
    automatic_sharding: "layers/**",
    sharded_by_hand: "layers/**",
    svi: "state/**",
    ode: "rate",
}


@functools.cache
def bare(program: Program, steps: int = len(BATCHES)) -> Trained:
    return program(lambda step: step, BATCHES[:steps])


class Looking:
    """The features that look at a training: each returns a context, or a step in it. They leave messages, and files."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.messages: list[Any] = []

    def outputs(self, *step: Any) -> Any:
        return self._observe(PLACES[self.program], ["output", "input"], *step)

    def gradients(self, *step: Any) -> Any:
        return self._observe(PLACES[self.program], ["output", "grad"], *step)

    def parameters(self, *step: Any) -> Any:
        return self._observe(PARAMETERS[self.program], ["param", "param grad", "update"], *step)

    def nonfinite(self, *step: Any) -> Any:
        return hcb.watch_nonfinite(*step)

    def capsules(self, *step: Any) -> Any:
        return hcb.capsule(*step, self.folder, nonfinite=True, exceptions=True)

    def everything(self, *step: Any) -> Any:
        for feature in (self.gradients, self.nonfinite, self.capsules):
            step = (feature(*step),)
        return step[0]

    def _observe(self, where: Any, what_of: list[str], *step: Any) -> Any:
        return hcb.observe(*step, where=where, what=["norm"], what_of=what_of, tap_func=self.messages.append)

    def check(self, feature: str, trained: Trained, plain: Trained) -> None:
        """Of a training with one feature: nothing was changed, and the feature was there."""
        assert not list(self.folder.iterdir())
        if feature in OBSERVED:
            assert len(self.messages) >= len(
                trained.losses
            )  # more where there are loops, or before the training
            norms = [float(np.max(value["norm"])) for value in self.messages[-1].values()]
            assert norms
            assert np.isfinite(norms).all()
        assert not plain.differences(trained, max_ulp=2 if (feature, self.program) in FUSED else 0)


OBSERVED = ("outputs", "gradients", "parameters", "everything")
FUSED = {("parameters", svi)} if os.environ.get("TEST_COMPILATION") == "full" else set()
"""Where XLA's fusion changes last bits; docs/design/xray.md has the reasons."""
# On the callback transport the statistics are XLA's reductions, which it fuses with what they measure: there the last
# bits of one of these programs, svi, differ. Capsules need the native transport.
FEATURES = [
    *(pytest.param(name, marks=pytest.mark.native_only) for name in ("outputs", "gradients", "parameters")),
    "nonfinite",
    pytest.param("capsules", marks=pytest.mark.native_only),
]
all_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def batches_of(feature: str, program: Program) -> Sequence[Batch]:
    # A training amplifies what its first step changes.
    return BATCHES[:2] if (feature, program) in FUSED else BATCHES


@pytest.mark.slow_variants(every=9)
@all_programs
@pytest.mark.parametrize("feature", FEATURES)
def test_in_a_block_the_training_is_the_bare_one(feature: str, program: Program, tmp_path: Path) -> None:
    looking, batches = Looking(program, tmp_path), batches_of(feature, program)
    with hcb.outfeed_receiver():
        with getattr(looking, feature)():
            trained = program(lambda step: step, batches)
        hcb.barrier_wait()
    looking.check(feature, trained, bare(program, len(batches)))


@pytest.mark.slow_variants(every=9)
@all_programs
@pytest.mark.parametrize("feature", FEATURES[1:])
def test_with_its_step_wrapped_the_training_is_the_bare_one(
    feature: str, program: Program, tmp_path: Path
) -> None:
    looking, batches = Looking(program, tmp_path), batches_of(feature, program)
    with hcb.outfeed_receiver():
        trained = program(getattr(looking, feature), batches)
        hcb.barrier_wait()
    looking.check(feature, trained, bare(program, len(batches)))


@pytest.mark.native_only
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p is not ode], ids=lambda program: program.__name__
)
def test_with_everything_and_leaks_checked_the_training_is_the_bare_one(
    program: Program, tmp_path: Path
) -> None:
    # diffrax 0.7, of ode, fails by itself under this check.
    looking, batches = Looking(program, tmp_path), BATCHES[:3]  # JAX traces the step in each call
    with jax.check_tracer_leaks():
        plain = program(lambda step: step, batches)
        with hcb.outfeed_receiver():
            trained = program(looking.everything, batches)
            hcb.barrier_wait()
    looking.check("everything", trained, plain)


@pytest.mark.parametrize("feature", FEATURES[1:])
def test_wrapped_inside_of_nnx_jit_the_training_is_the_bare_one(
    feature: str, monkeypatch: Any, tmp_path: Path
) -> None:
    flax_nnx = pytest.importorskip("flax.nnx")
    looking, real = Looking(nnx, tmp_path), flax_nnx.jit
    monkeypatch.setattr(flax_nnx, "jit", lambda step: real(getattr(looking, feature)(step)))
    with hcb.outfeed_receiver():
        trained = nnx(lambda step: step)
        hcb.barrier_wait()
    assert trained.calls == 1
    looking.check(feature, trained, bare(nnx))


@pytest.mark.slow_variants(every=9)
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p is not automatic_sharding], ids=lambda program: program.__name__
)
def test_with_its_places_timed_a_step_has_other_last_bits_at_most(program: Program) -> None:
    # The networks are so small that XLA would fuse what the readings part. Later steps amplify this.
    messages: list[Any] = []
    with hcb.outfeed_receiver():
        with hcb.observe(where=PLACES[program], what="time", tap_func=messages.append):
            trained = program(lambda step: step, BATCHES[:1])
        hcb.barrier_wait()
    plain = bare(program, 1)
    assert trained.calls == plain.calls
    np.testing.assert_allclose(trained.losses, plain.losses, rtol=1e-6)
    for got, expected in zip(trained.leaves, plain.leaves, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)
    found = [(place, value) for message in messages for place, value in message.items()]
    assert all(np.all(value["seconds"] >= 0) for _, value in found)
    assert len({place for place, _ in found}) > 1  # an iteration of a while loop is a message


def test_a_difference_is_found() -> None:
    trained = bare(haiku)
    other = copy.deepcopy(trained)
    assert not trained.differences(other)
    other.leaves[0].view(np.int32).flat[0] += 1
    other.losses[3] = float(np.nextafter(np.float32(other.losses[3]), np.float32(np.inf)))
    other.calls += 1
    assert len(trained.differences(other)) == 3
    assert len(trained.differences(other, max_ulp=1)) == 1


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
