"""Checks are switched off and on at run time, by name or all of them, in programs that are compiled already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from failing import failed, failed_once
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from transforming import Jit, no_jit


@pytest.fixture(autouse=True)
def everything_on_again() -> Iterator[None]:
    yield
    hcb.enable_checks()


def two_checks(x: Any) -> Any:
    hcb.check(x > 0, "a {}", x, name="a")
    hcb.check(x > 0, "b {}", x, name="b")
    return x


def texts() -> list[str]:
    return [check.explanation.text for check in failed()]


def test_all_checks_are_switched_off_and_on_without_recompiling(jit: Jit) -> None:
    traced = []

    def f(x: Any) -> Any:
        traced.append(x)
        return two_checks(x)

    compiled = jit(f)
    compiled(-1.0)
    assert texts() == ["a -1.0", "b -1.0"]
    count = len(traced)
    hcb.disable_checks()
    compiled(-2.0)
    hcb.barrier_wait()
    hcb.enable_checks()
    compiled(-3.0)
    assert texts() == ["a -3.0", "b -3.0"]
    if jit is not no_jit:
        assert len(traced) == count


def test_checks_are_switched_by_name_before_and_after_they_are_traced(jit: Jit) -> None:
    f = jit(two_checks)
    hcb.disable_checks("a", "unknown")
    f(-1.0)
    assert texts() == ["b -1.0"]
    hcb.disable_checks("b")
    f(-2.0)
    hcb.barrier_wait()
    hcb.enable_checks("a")
    f(-3.0)
    assert texts() == ["a -3.0"]


def test_single_checks_stay_on_while_all_others_are_off(jit: Jit) -> None:
    f = jit(two_checks)
    f(-1.0)
    assert len(texts()) == 2
    hcb.disable_checks()
    hcb.enable_checks("b")
    f(-2.0)
    assert texts() == ["b -2.0"]
    jit(lambda x: two_checks(x + 0))(-3.0)
    assert texts() == ["b -3.0"]
    hcb.disable_checks("b")
    f(-4.0)
    hcb.barrier_wait()


def test_a_switch_reaches_a_program_that_runs() -> None:
    def switch(x: Any) -> None:
        if int(x) == 3:
            hcb.disable_checks()

    def step(c: Any, i: Any) -> Any:
        hcb.check(i < 0, "step {}", i)
        c = hcb.call(lambda x: (switch(x), x)[1], i, result_shape=i)
        return c, None

    jax.jit(lambda: lax.scan(step, 0, jnp.arange(10)))()
    assert failed_once().count == 4


def test_a_switch_holds_on_every_device() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    f = jax.jit(
        jax.shard_map(two_checks, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    )
    hcb.disable_checks("a")
    f(-jnp.ones(4))
    check = failed_once()
    assert (check.name, check.count) == ("b", 4)


def test_names_that_are_not_texts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"names of checks are texts, got \[1\]"):
        hcb.disable_checks(1)  # type: ignore[arg-type]
