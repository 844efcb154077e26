"""`jax.experimental.ode.odeint`: every evaluation of the right-hand side is tapped, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, PRIMAL, Jit, delivered


def evaluations_as_jax_sees_them(solve: Any, rate: Any) -> list[float]:
    """The values of the right-hand side in `solve(rate)`, by JAX's own callback."""
    seen: list[float] = []

    def observed(y: Any, t: Any) -> Any:
        out = rate(y, t)
        jax.debug.callback(lambda v: seen.append(float(v)), out, ordered=True)
        return out

    jax.block_until_ready(jax.jit(lambda: solve(observed))())
    jax.effects_barrier()
    return seen


@pytest.mark.slow
def test_odeint_taps_every_evaluation_of_its_right_hand_side(jit: Jit, rec: Recorder) -> None:
    times = jnp.array([0.0, 0.1, 0.3])

    def solve(rate: Any) -> Any:
        return odeint(rate, jnp.float32(1.0), times)

    out = jit(lambda: solve(lambda y, t: hcb.id_tap(rec, -y)))()
    messages = delivered(rec)
    assert {transforms for transforms, _ in messages} == {PRIMAL}
    np.testing.assert_array_equal(
        np.array(rec.values), np.float32(evaluations_as_jax_sees_them(solve, lambda y, t: -y))
    )
    np.testing.assert_allclose(out, np.exp(-times), rtol=1e-5)


@pytest.mark.slow
def test_grad_of_odeint_taps_the_evaluations_of_both_solutions_and_their_cotangents(
    jit: Jit, rec: Recorder
) -> None:
    times = jnp.array([0.0, 0.1])

    def solve(rate: Any) -> Any:
        return jax.grad(lambda y: odeint(rate, y, times)[-1])(jnp.float32(1.0))

    gradient = jit(lambda: solve(lambda y, t: hcb.id_tap(rec, -y)))()
    messages = delivered(rec)
    primals = [value for transforms, value in messages if transforms == PRIMAL]
    cotangents = [value for transforms, value in messages if transforms == COTANGENT]
    np.testing.assert_allclose(
        primals, evaluations_as_jax_sees_them(solve, lambda y, t: -y), rtol=1e-3, atol=1e-4
    )
    # Backward, each step evaluates a vector-Jacobian product, and each of the times the right-hand side alone.
    forward = evaluations_as_jax_sees_them(
        lambda rate: odeint(rate, jnp.float32(1.0), times), lambda y, t: -y
    )
    assert len(cotangents) == len(primals) - len(forward) - (len(times) - 1)
    assert len(primals) + len(cotangents) == len(messages)
    np.testing.assert_allclose(gradient, np.exp(-0.1), rtol=1e-5)
