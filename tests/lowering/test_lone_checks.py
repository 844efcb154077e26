"""Checks that stand alone are lowered as they are; those that follow each other, together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.primitives import effects


def all_finite(x: Any, name: str) -> None:
    hcb.check(jnp.isfinite(x).all(), "not finite", name=name)


def apart(x: Any) -> Any:
    all_finite(x, "before")
    y = x @ x
    all_finite(y, "after")
    return y


def together(x: Any) -> Any:
    y = x @ x
    all_finite(x, "one")
    all_finite(y, "other")
    return y


@pytest.mark.native_only
@pytest.mark.skipif(not effects.installed, reason="groups are made by fast dispatch")
@pytest.mark.parametrize(("program", "tests"), [(apart, 0), (together, 1)])
def test_only_checks_that_follow_each_other_have_a_native_test(program: Any, tests: int) -> None:
    text = jax.jit(program).lower(jnp.ones((4, 4))).as_text()
    assert text.count("@hostcallback_not_finite") == tests
