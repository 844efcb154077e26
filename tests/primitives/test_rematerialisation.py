"""`jax.checkpoint`: a tap in recomputed code fires once, whatever the policy, and costs no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import hostcallback as hcb
from recorder import Recorder
from transforming import COTANGENT, JVP, PRIMAL, TANGENT, TRANSPOSE, Jit, batch, delivered

Checkpoint = Callable[[Callable[..., Any]], Callable[..., Any]]

POLICIES = jax.checkpoint_policies
CHECKPOINTS = [
    pytest.param({}, id="no policy"),
    pytest.param({"policy": POLICIES.nothing_saveable}, id="nothing_saveable"),
    pytest.param({"policy": POLICIES.everything_saveable}, id="everything_saveable"),
    pytest.param({"policy": POLICIES.dots_saveable}, id="dots_saveable"),
    pytest.param({"policy": POLICIES.save_only_these_names("sine")}, id="save_only_these_names"),
    pytest.param({"prevent_cse": False}, id="prevent_cse=False"),
]


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return lambda f: jax.checkpoint(f, **request.param)


def sine_of_tapped_sine(rec: Recorder) -> Callable[[Any], Any]:
    return lambda x: jnp.sin(hcb.id_tap(rec, checkpoint_name(jnp.sin(x), "sine")))


# Messages of `sine_of_tapped_sine` at 1: sin(1), and the cotangent cos(sin(1)).
SINE, COSINE = 0.8415, 0.6664
ONCE = [(PRIMAL, SINE), (COTANGENT, COSINE)]
# The same twice over, the second sine of the first result.
TWICE = [(PRIMAL, SINE), (PRIMAL, 0.6784), (COTANGENT, 0.7786), (COTANGENT, 0.3811)]


def test_without_differentiation_a_checkpoint_changes_nothing(checkpoint: Checkpoint, rec: Recorder) -> None:
    jax.jit(checkpoint(sine_of_tapped_sine(rec)))(1.0)
    assert delivered(rec) == [(PRIMAL, SINE)]


def test_jvp_of_a_checkpoint(checkpoint: Checkpoint, rec: Recorder) -> None:
    jax.jit(lambda x: jax.jvp(checkpoint(sine_of_tapped_sine(rec)), (x,), (1.0,)))(1.0)
    assert delivered(rec) == [(PRIMAL, SINE), (TANGENT, 0.5403)]


def test_grad_of_a_checkpoint_taps_the_primal_once(jit: Jit, checkpoint: Checkpoint, rec: Recorder) -> None:
    gradient = jit(jax.grad(checkpoint(sine_of_tapped_sine(rec))))(1.0)
    assert delivered(rec) == ONCE
    np.testing.assert_allclose(gradient, np.cos(1.0) * np.cos(np.sin(1.0)), rtol=1e-6)


def test_a_tap_whose_result_is_unused_in_a_checkpoint(checkpoint: Checkpoint, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(rec, jnp.cos(x))
        hcb.id_tap(rec, 1.0)
        return jnp.sin(jnp.sin(x))

    jax.jit(jax.grad(checkpoint(f)))(1.0)
    assert delivered(rec) == [(PRIMAL, 0.5403), (PRIMAL, 1.0)]


def test_a_checkpoint_in_a_scan(jit: Jit, checkpoint: Checkpoint, rec: Recorder) -> None:
    step = checkpoint(sine_of_tapped_sine(rec))
    jit(jax.grad(lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]))(1.0)
    assert delivered(rec) == TWICE


@pytest.mark.parametrize("each_step", [False, True], ids=["of steps", "of checkpoints"])
def test_a_checkpoint_around_a_scan(checkpoint: Checkpoint, rec: Recorder, each_step: bool) -> None:
    step = sine_of_tapped_sine(rec)
    if each_step:
        step = checkpoint(step)
    loop = checkpoint(lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0])
    jax.jit(jax.grad(loop))(1.0)
    assert delivered(rec) == TWICE


def test_a_checkpoint_in_a_checkpoint(checkpoint: Checkpoint, rec: Recorder) -> None:
    jax.jit(jax.grad(checkpoint(lambda x: checkpoint(sine_of_tapped_sine(rec))(x) + 1)))(1.0)
    assert delivered(rec) == ONCE


def test_a_checkpoint_of_a_checkpoint_that_only_taps_a_constant(
    checkpoint: Checkpoint, rec: Recorder
) -> None:
    # The code has no inputs and no used result: before 0.12 JAX dropped code that only has an effect.
    def f(x: Any) -> Any:
        hcb.id_tap(rec, 1.0)
        return 2 * x

    jax.jit(jax.grad(checkpoint(checkpoint(f))))(1.0)
    assert delivered(rec) == [(PRIMAL, 1.0)]


def test_a_checkpoint_around_jit_and_cond(checkpoint: Checkpoint, rec: Recorder) -> None:
    f = sine_of_tapped_sine(rec)
    jax.jit(jax.grad(checkpoint(jax.jit(f))))(1.0)
    jax.jit(jax.grad(checkpoint(lambda x: lax.cond(x > 0, f, lambda x: x, x))))(1.0)
    assert delivered(rec) == ONCE * 2


def test_a_checkpoint_around_a_while_loop_that_is_not_differentiated_taps_its_iterations_once(
    jit: Jit, checkpoint: Checkpoint, rec: Recorder
) -> None:
    def f(x: Any) -> Any:
        n = lax.while_loop(lambda n: hcb.id_tap(rec, n) < 2, lambda n: hcb.id_tap(rec, n + 10) - 9, 0)
        return jnp.sin(x * n)

    gradient = jit(jax.grad(checkpoint(f)))(1.0)
    assert delivered(rec) == [(PRIMAL, n) for n in (0, 10, 1, 11, 2)]
    np.testing.assert_allclose(gradient, 2 * np.cos(2.0), rtol=1e-6)


def test_jvp_and_linearize_of_a_checkpoint_around_a_while_loop(checkpoint: Checkpoint, rec: Recorder) -> None:
    f = checkpoint(lambda x: lax.while_loop(lambda c: c < 4, lambda c: hcb.id_tap(rec, 2 * c), x))
    both = [(PRIMAL, 2.0), (TANGENT, 2.0), (PRIMAL, 4.0), (TANGENT, 4.0)]
    jax.jit(lambda x: jax.jvp(f, (x,), (1.0,)))(1.0)
    assert delivered(rec) == both
    # JAX saves nothing of a while_loop: the linear function runs all of it again, checkpoint or not.
    jax.jit(lambda x: jax.linearize(f, x)[1](1.0))(1.0)
    assert delivered(rec)[4:] == [(PRIMAL, 2.0), (PRIMAL, 4.0), *both]


def test_vmap_of_grad_and_grad_of_vmap_of_a_checkpoint(checkpoint: Checkpoint, rec: Recorder) -> None:
    f = checkpoint(sine_of_tapped_sine(rec))
    jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(2))
    jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(jnp.ones(2))
    assert delivered(rec) == [
        ((batch(0),), [SINE] * 2),
        ((*COTANGENT, batch(0)), [COSINE] * 2),
        ((batch(0),), [SINE] * 2),
        ((batch(0), JVP, TRANSPOSE), [COSINE] * 2),
    ]


def test_hessian_of_a_checkpoint_taps_the_primal_once(checkpoint: Checkpoint, rec: Recorder) -> None:
    jax.jit(jax.hessian(checkpoint(sine_of_tapped_sine(rec))))(1.0)
    assert [transforms for transforms, _ in delivered(rec)] == [
        PRIMAL,
        (JVP, batch(0)),
        (*COTANGENT, batch(0)),
        (*COTANGENT, batch(0), JVP, batch(0)),
    ]


def residuals(f: Callable[[Any], Any], x: Any) -> list[tuple[int, ...]]:
    """Shapes of the values that the backward pass keeps of the forward pass."""
    return sorted(leaf.shape for leaf in jax.tree.leaves(jax.vjp(f, x)[1]))


@pytest.mark.parametrize("options", CHECKPOINTS)
def test_a_tap_does_not_change_the_saved_values(options: dict[str, Any]) -> None:
    def through_scan(tap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(c: Any, _: Any) -> Any:
            c = tap(checkpoint_name(jnp.sin(c), "sine"))
            return jnp.sin(tap(c @ c)), None

        step = jax.checkpoint(step, **options)
        return lambda x: lax.scan(step, x, None, length=3)[0].sum()

    x = jnp.ones((4, 4))
    tapped = through_scan(lambda v: hcb.id_tap(lambda _: None, v))
    assert residuals(tapped, x) == residuals(through_scan(lambda v: v), x)
    hcb.barrier_wait()


def stopped_loop(x: Any) -> Any:
    return hcb.while_loop(lambda c: c < 5, lambda c: c * 1.1 + 0.1, x, stop=True, progress=False)[0]


def stopped_loop_with_a_traced_bound(x: Any) -> Any:
    bound = jnp.round(jax.lax.stop_gradient(x)).astype(int)
    return hcb.fori_loop(0, bound, lambda i, c: c * 1.1, x, stop=True, progress=False)[0]


def loop_with_a_call(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    factor = lambda: hcb.call(lambda v: np.float32(1.1), jnp.float32(1), result_shape=shape)  # noqa: E731
    return lax.while_loop(lambda c: c < 5, lambda c: c * factor() + 0.1, x)


@pytest.mark.parametrize("loop", [stopped_loop, stopped_loop_with_a_traced_bound, loop_with_a_call])
@pytest.mark.parametrize(
    "derive", [jax.grad, lambda f: lambda x: jax.linearize(f, x)], ids=["grad", "linearize"]
)
def test_a_loop_whose_steps_cannot_be_run_again_is_refused(loop: Any, derive: Any) -> None:
    where = rf"{Path(__file__).name}:\d+ \({loop.__name__}"
    with pytest.raises(ValueError, match=rf"a jax\.checkpoint depends on .* Use hcb\.scan, .*, at .*{where}"):
        derive(jax.checkpoint(loop))(2.0)
    value, tangent = jax.jvp(jax.checkpoint(loop), (2.0,), (1.0,))
    assert value > 2
    assert tangent > 1
    fixed = jax.checkpoint(lambda x: x * loop(jax.lax.stop_gradient(x)))
    np.testing.assert_allclose(jax.grad(fixed)(2.0), value, rtol=1e-6)
