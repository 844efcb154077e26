"""`hcb.checked` makes a step that raises the failures of its checks, and returns its results otherwise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from failing import failed_once
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from transforming import Jit


def positive(x: Any) -> Any:
    hcb.check(x > 0, "x is {}", x)
    return x * 2


def test_a_step_whose_checks_hold_returns_its_results(jit: Jit) -> None:
    step = hcb.checked(jit(lambda x, scale=1: {"y": positive(x) * scale}))
    assert float(step(2.0)["y"]) == 4
    assert float(step(2.0, scale=3)["y"]) == 12


def test_a_step_raises_if_a_check_in_it_failed_and_works_again_afterwards(jit: Jit) -> None:
    step = hcb.checked(jit(positive))
    for _ in range(2):
        with pytest.raises(hcb.TapFunctionException) as caught:
            step(-2.0)
        (error,) = caught.value.exceptions
        assert isinstance(error, hcb.CheckError)
        assert error.check.explanation.text == "x is -2.0"
        assert float(step(2.0)) == 4
    hcb.barrier_wait()  # nothing is reported twice


def test_failures_from_before_stay_for_the_barrier() -> None:
    other = jax.jit(lambda x: (hcb.check(x > 0, "other {}", x), x)[1])
    step = hcb.checked(jax.jit(positive))
    other(-1.0)
    assert float(step(1.0)) == 2
    with pytest.raises(hcb.TapFunctionException) as caught:
        step(-3.0)
    assert [e.check.explanation.text for e in caught.value.exceptions] == ["x is -3.0"]  # type: ignore[attr-defined]
    assert failed_once().explanation.text == "other -1.0"


def test_donated_arguments() -> None:
    step = hcb.checked(hcb.jit(positive, donate_argnums=0))
    x = jnp.float32(1)
    for _ in range(3):
        x = step(x)
    assert float(x) == 8
    with pytest.raises(hcb.TapFunctionException):
        step(-x)


def test_pmap_and_shard_map() -> None:
    step: Any = hcb.checked(jax.pmap(positive))
    assert step(jnp.ones(4)).tolist() == [2, 2, 2, 2]
    with pytest.raises(hcb.TapFunctionException) as caught:
        step(jnp.array([1.0, -1.0, 1.0, -1.0]))
    assert dict(caught.value.exceptions[0].check.by_device) == {"cpu:1": 1, "cpu:3": 1}  # type: ignore[attr-defined]
    mesh = Mesh(jax.devices(), ("i",))
    manual = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    step = hcb.checked(hcb.jit(jax.shard_map(positive, **manual)))
    assert step(jnp.ones(4)).tolist() == [2, 2, 2, 2]
    with pytest.raises(hcb.TapFunctionException):
        step(jnp.array([1.0, 1.0, -1.0, 1.0]))


def test_a_program_that_a_check_ended_raises_the_check() -> None:
    endless = hcb.checked(
        jax.jit(
            lambda x: lax.while_loop(lambda c: True, lambda c: (hcb.check(c < 9, "at {}", c), c + 1)[1], x)
        )
    )
    with hcb.outfeed_receiver(on_error="abort"):
        with pytest.raises(hcb.TapFunctionException, match="at 9") as caught:
            endless(0)
    assert caught.value.__cause__ is not None
    assert "ends the program" in str(caught.value.__cause__)


def test_inside_another_trace_it_is_the_step_itself() -> None:
    step = hcb.checked(jax.jit(positive))
    assert jax.jit(jax.grad(step))(-1.0) == 2
    assert failed_once().count == 1


def test_it_keeps_the_steps_name_and_takes_functions_only() -> None:
    assert hcb.checked(positive).__name__ == "positive"
    with pytest.raises(TypeError, match=r"hcb\.checked takes a function, got int 3"):
        hcb.checked(3)  # type: ignore[arg-type]


def test_a_tap_error_in_a_step_waits_for_the_barrier() -> None:
    def bad(x: Any) -> None:
        raise KeyError("tap")

    step = hcb.checked(jax.jit(lambda x: hcb.id_tap(bad, x)))
    step(1.0)
    with pytest.raises(hcb.TapFunctionException):
        hcb.barrier_wait()
