"""Checks that follow each other are tested together, and tell what they tell alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing import failed, failed_once
from jax import lax

import hostcallback as hcb
from hostcallback.lowering import check_groups
from hostcallback.primitives import effects
from transforming import PROGRAM_FAILED


def branches(function: Callable[..., Any], *args: Any) -> int:
    """The number of branches that the function's program has before XLA optimizes it."""
    return len(re.findall(r"stablehlo\.(?:if|case)\"?\(", jax.jit(function).lower(*args).as_text()))


grouped = pytest.mark.skipif(
    not effects.installed,
    reason="programs are rewritten by fast dispatch, which HOSTCALLBACK_FAST_DISPATCH=0 leaves out",
)


def three(x: Any) -> Any:
    y = x * 2
    hcb.check(jnp.isfinite(x).all(), "x ends with {}", x[-1])
    hcb.check((y < 9).all(), "y ends with {}, x starts with {x}", y[-1], x=x[0])
    hcb.check(x > 0, "x is not positive")
    return y


@grouped
@pytest.mark.native_only
def test_checks_that_follow_each_other_have_one_branch_and_one_native_test() -> None:
    text = jax.jit(three).lower(jnp.ones(4)).as_text()
    assert branches(three, jnp.ones(4)) == 1
    assert text.count("@hostcallback_not_finite") == 1
    with hcb.outfeed_receiver() as rx:
        assert jax.jit(three)(jnp.ones(4)).tolist() == [2.0] * 4
    assert sum(stats.delivered for stats in rx.stats) == 0


@grouped
@pytest.mark.native_only
def test_the_compiler_knows_the_line_of_the_last_check_for_all() -> None:
    text = jax.jit(three).lower(jnp.ones(4)).as_text(debug_info=True)
    (at,) = re.findall(r"@hostcallback_not_finite\(.*loc\((#loc\d*)\)", text)
    for _ in range(5):  # a name, a call, and then the line
        (at,) = re.findall(rf"^{at} = loc\((.*)\)$", text, re.MULTILINE)
        if found := re.match(r'"[^"]*test_groups\.py":(\d+):', at):
            break
        at = re.findall(r"#loc\d*", at)[0]
    assert found is not None, at
    assert int(found[1]) == three.__code__.co_firstlineno + 4


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (np.nan, ["x ends with nan", "y ends with nan, x starts with 1.0", "x is not positive"]),
        (np.inf, ["x ends with inf", "y ends with inf, x starts with 1.0"]),
        (5.0, ["y ends with 10.0, x starts with 1.0"]),
        (-1.0, ["x is not positive"]),
    ],
)
def test_each_check_of_a_group_fails_alone(value: float, texts: list[str]) -> None:
    jax.jit(three)(jnp.array([1.0, 2.0, value]))
    assert [check.explanation.text for check in failed()] == texts


def test_an_unreduced_predicate_in_a_group_names_its_elements() -> None:
    jax.jit(three)(jnp.array([1.0, -2.0, 3.0]))
    assert failed_once().explanation.where == "1 of 3 values are false, the first at [1]"


@pytest.mark.slow_variants(every=7)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("value", [0.0, 1e4, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("size", [0, 1, 3, 4096])
def test_all_types_of_numbers_are_tested(dtype: str, value: float, size: int) -> None:
    def f(x: Any) -> Any:
        hcb.check(jnp.isfinite(x).all(), "x", name="x")
        hcb.check(jnp.isfinite(x[:0]).all(), "none", name="none")
        return x

    with jax.enable_x64(True):
        x = jnp.ones(size, dtype).at[size // 2 :].set(value)
        jax.jit(f)(x)
        if np.isfinite(value) or not size:
            hcb.barrier_wait()
        else:
            assert failed_once().name == "x"


@pytest.mark.native_only
def test_a_loop_between_two_checks_comes_behind_the_first() -> None:
    def f(x: Any) -> Any:
        hcb.check(x > 0, "before")
        x = lax.while_loop(lambda x: x < 10, lambda x: x + 1, x)
        hcb.check(x > 0, "behind")
        return x

    assert branches(f, jnp.float32(1)) == 2


def test_a_tap_between_two_checks_keeps_its_place() -> None:
    got: list[str] = []

    def f(x: Any) -> Any:
        hcb.check(x > 0, "first {}", x, name="first")
        hcb.callback(lambda: got.append("tap"))
        hcb.check(x > 1, "second", name="second")
        hcb.check(x > 2, "third", name="third")
        return x

    jax.jit(f)(jnp.float32(0))
    checks = failed()
    assert got == ["tap"]
    assert [check.name for check in checks] == ["first", "second", "third"]
    assert [check.first.seq - checks[0].first.seq for check in checks] == [0, 2, 3]


@pytest.mark.parametrize("kind", ["scan", "while", "cond", "jit", "vmap", "grad"])
def test_groups_inside_other_programs_report_what_single_checks_report(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(x: Any, i: Any) -> Any:
        hcb.check(jnp.isfinite(x / (i - 2)).all(), "at {}: {}", i, x, name="finite")
        hcb.check(i != 3, "three {}", i, name="three")
        hcb.check((x < i + 1).all(), "small", name="small")
        return x + 1.0

    def scan(x: Any) -> Any:
        return lax.scan(lambda c, i: (body(c, i), i), x, jnp.arange(5))

    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, body(c[1], c[0])), (0, x))

    programs: dict[str, Callable[[Any], Any]] = {
        "scan": scan,
        "while": loop,
        "cond": lambda x: lax.cond(x[0] < 9, lambda x: body(x, 2), lambda x: body(x, 3), x),
        "jit": lambda x: jax.jit(body)(jax.jit(body)(x, 2), 3),
        "vmap": jax.vmap(lambda x: body(jnp.stack([x, x]), x.astype(int))),
        "grad": jax.grad(lambda x: body(x, 2.0).sum()),
    }
    x, reports = jnp.array([1.0, 2.0, 3.0]), []
    for group in (effects.group_checks, None):
        monkeypatch.setattr(effects, "group_checks", group)
        jax.jit(lambda x: programs[kind](x))(x)
        reports.append(
            [(c.name, c.count, c.explanation.text, c.explanation.where, c.first.seq) for c in failed()]
        )
    assert len(reports[0]) > 1
    base = reports[1][0][4] - reports[0][0][4]
    assert [(*rest, seq + base) for *rest, seq in reports[0]] == reports[1]


def test_a_failed_check_of_a_group_ends_the_program_before_the_next() -> None:
    def f(x: Any) -> Any:
        hcb.check(x > 0, "first", name="first")
        hcb.check(x > 1, "second", name="second")
        return x

    with pytest.raises(hcb.TapFunctionException) as caught, hcb.outfeed_receiver(on_error="abort"):
        with pytest.raises(PROGRAM_FAILED):
            jax.jit(f)(jnp.float32(0)).block_until_ready()
    assert [error.check.name for error in caught.value.exceptions] == ["first"]  # type: ignore[attr-defined]


def test_one_check_of_a_group_is_switched_off() -> None:
    f = jax.jit(three)
    hcb.disable_checks("off")

    def with_names(x: Any) -> Any:
        hcb.check((x > 0).all(), "off", name="off")
        hcb.check((x > 0).all(), "on", name="on")
        return x

    try:
        f(jnp.ones(3))
        jax.jit(with_names)(-jnp.ones(3))
        assert failed_once().name == "on"
    finally:
        hcb.enable_checks("off")


@grouped
@pytest.mark.native_only
def test_large_operands_keep_a_check_out_of_groups_so_that_they_can_be_written_over() -> None:
    large = jnp.ones(check_groups.MAX_BYTES // 4 + 1)

    def sends(x: Any) -> Any:
        hcb.check(x[0] > 0, "x is {}", x)
        x = x + 1
        hcb.check(x[0] > 0, "x is {}", x)
        return x

    def reduces(x: Any) -> Any:
        hcb.check(jnp.isfinite(x).all(), "x")
        x = x + 1
        hcb.check(jnp.isfinite(x).all(), "x")
        return x

    assert branches(sends, large) == 2
    assert branches(sends, large[:8]) == 1
    text = jax.jit(reduces).lower(large).as_text()
    (test,) = (line for line in text.splitlines() if "@hostcallback_not_finite" in line)
    assert "(tensor<i1>, tensor<i1>)" in test
    jax.jit(reduces)(large.at[-1].set(jnp.nan))
    assert [check.count for check in failed()] == [1, 1]


def many(x: Any) -> Any:
    for i in range(check_groups.MAX_CHECKS + 3):
        hcb.check(x != i, "is {}", i, name=f"check {i}")
    return x


@grouped
@pytest.mark.native_only
def test_many_checks_form_groups_of_limited_size() -> None:
    assert branches(many, jnp.float32(1)) == 2


@pytest.mark.parametrize("wrong", [0, check_groups.MAX_CHECKS - 1, check_groups.MAX_CHECKS])
def test_a_failure_in_any_of_several_groups_is_told(wrong: int) -> None:
    jax.jit(many)(jnp.float32(wrong))
    assert failed_once().name == f"check {wrong}"
