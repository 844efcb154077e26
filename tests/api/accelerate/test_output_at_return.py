"""The call of a program on one device returns with its output, wherever XLA ends the program, as JAX's does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

LENGTH = 5


def training(called: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
    """Scanned training steps, which XLA mostly ends on a thread of its pool."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = x
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight) + jnp.sin(hidden)
            return (hidden**2).sum()

        found, gradient = jax.value_and_grad(loss)(weights)
        jax.debug.callback(called, found)
        return [weight - 1e-3 * slope for weight, slope in zip(weights, gradient, strict=True)]

    return jax.jit(
        lambda x, weights: jax.lax.scan(lambda w, _: (step(w, x), None), weights, None, length=LENGTH)[0]
    )


def arguments() -> tuple[Any, list[Any]]:
    """A batch and eight layers."""
    weights = [jnp.full((300, 300), 0.01 * layer) for layer in range(8)]
    return jax.block_until_ready((jnp.ones((64, 300)), weights))


@pytest.mark.native_only
def test_a_training_step_returns_with_the_output_of_its_callbacks() -> None:
    seen: list[Any] = []
    with hcb.accelerate():
        train = training(seen.append)
        x, weights = arguments()
        for count in range(1, 31):
            weights = train(x, weights)
            assert len(seen) == LENGTH * count  # before anything waits for the weights
            jax.block_until_ready(weights)


def test_a_tap_function_may_run_such_a_program() -> None:
    # Its callbacks come after it in the queue of the same device, so that its program must not wait for them.
    inner: list[Any] = []
    outer: list[float] = []
    with hcb.accelerate():
        train = training(inner.append)
        x, weights = arguments()
        jax.block_until_ready(train(x, weights))

        def run(value: Any) -> None:
            start = time.perf_counter()
            jax.block_until_ready(train(x, weights))
            outer.append(time.perf_counter() - start)

        program = jax.jit(lambda x: [hcb.id_tap(run, x), x + 1][1])
        for _ in range(10):
            program(np.float32(1)).block_until_ready()
        hcb.barrier_wait()
    assert len(outer) == 10
    assert len(inner) == LENGTH * 11
    assert sorted(outer)[5] < 0.9  # an unanswered wait takes a second


@pytest.mark.slow
def test_a_callback_that_takes_long_is_waited_for_where_jax_waits() -> None:
    seen: list[Any] = []
    pause = threading.Event()

    def slow(value: Any) -> None:
        pause.wait(0.1)
        seen.append(value)

    with hcb.accelerate():
        train = training(slow)
        x, weights = arguments()
        for count in range(1, 4):
            weights = jax.block_until_ready(train(x, weights))
            assert len(seen) == LENGTH * count


@pytest.mark.native_only
def test_only_in_the_block_a_call_enters_python_to_wait() -> None:
    seen: list[Any] = []

    def program(x: Any) -> Any:
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return x + 1

    def entered(value: float) -> bool:
        files: set[str] = set()
        sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
        try:
            np.asarray(compiled(value))
        finally:
            sys.setprofile(None)
        return any(file.endswith("accelerate.py") for file in files)

    compiled = jax.jit(program)
    with hcb.accelerate():
        compiled(0.0)
        assert entered(1.0)
    assert not entered(2.0)
    with hcb.accelerate():
        assert entered(3.0)
    hcb.barrier_wait()
    assert seen == [0.0, 1.0, 2.0, 3.0]
