"""A failed check that is raised has the step that the log of the run gives it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.cli import main


def raised(run: Callable[[], Any]) -> hcb.CheckError:
    with pytest.raises(hcb.TapFunctionException) as caught:
        run()
    (error,) = caught.value.exceptions
    assert isinstance(error, hcb.CheckError)
    return error


def recorded(train: Callable[[], Any], log: Path) -> hcb.CheckError:
    def run() -> None:
        with hcb.outfeed_receiver(record=log):
            train()

    return raised(run)


def step_in(log: Path, capsys: pytest.CaptureFixture[str]) -> int | None:
    main(["errors", str(log), "--json"])
    step: int | None = json.loads(capsys.readouterr().out)["first"]["step"]
    return step


def check(x: Any, step: Any) -> None:
    hcb.check(x != 5, "x is {}", x)


def before(x: Any, step: Any) -> None:
    check(x, step)
    hcb.metrics({"loss": x}, step=step)


def after(x: Any, step: Any) -> None:
    hcb.id_tap(lambda value: None, {"loss": x, "step": step})
    check(x, step)


def loop(body: Callable[[Any, Any], None]) -> None:
    step = jax.jit(body)
    for i in range(10):
        step(jnp.float32(i), jnp.int32(i))


def scan(body: Callable[[Any, Any], None]) -> None:
    def one(carry: Any, i: Any) -> Any:
        body(carry, i)
        return carry + 1, None

    for _ in range(2):  # in the first launch the reader learns which tap comes first
        jax.jit(lambda: lax.scan(one, jnp.float32(0), jnp.arange(10)))()


@pytest.mark.parametrize("program", [loop, scan])
@pytest.mark.parametrize("body", [before, after])
def test_a_failure_has_the_step_that_the_log_has(
    program: Any, body: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = recorded(lambda: program(body), tmp_path)
    logged = step_in(tmp_path, capsys)
    assert error.step == error.check.first.step == error.check.last.step == logged
    assert (f", step {logged}, message " in str(error)) == (logged is not None)


@pytest.mark.native_only  # the callback transport does not know the launch of a message
@pytest.mark.parametrize("body", [before, after])
def test_a_failure_in_a_launch_of_one_step_has_that_step(body: Any, tmp_path: Path) -> None:
    assert recorded(lambda: loop(body), tmp_path).step == 5


@pytest.mark.native_only
def test_a_barrier_in_the_block_finds_it_too(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path) as receiver:
        loop(before)
        error = raised(hcb.barrier_wait)
        assert (error.step, receiver.failed_checks[0].first.step) == (5, 5)


def test_a_check_that_names_its_step_has_it_without_a_log() -> None:
    step = jax.jit(lambda x, i: hcb.check(x != 5, "x is {} at {step}", x, step=i))
    for i in range(10):
        step(jnp.float32(i), jnp.int32(i))
    error = raised(hcb.barrier_wait)
    assert error.step == 5
    assert ", step 5, message " in str(error)


@pytest.mark.native_only
def test_a_checked_step_has_it(tmp_path: Path) -> None:
    step = hcb.checked(jax.jit(before))
    with hcb.outfeed_receiver(record=tmp_path):
        for i in range(5):
            step(jnp.float32(i), jnp.int32(i))
        assert raised(lambda: step(jnp.float32(5), jnp.int32(5))).step == 5


def test_without_a_step_there_is_none(tmp_path: Path) -> None:
    error = recorded(lambda: loop(check), tmp_path)
    assert error.step is None
    assert "step" not in str(error).partition("first at")[2].partition("message")[0]


def test_the_steps_of_failures_are_known_by_line() -> None:
    step = jax.jit(lambda x, i: hcb.check(x, "x is false at {step}", step=i))
    with hcb.error_collector(on_error="warn") as errors:
        for i in range(200):
            step(i not in (7, 130, 160), i)
            hcb.barrier_wait()
        for i in range(200, 400):
            step(False, i)
    (check,) = errors.failed_checks
    assert (check.count, check.step, check.steps[:3], check.steps[-1]) == (203, 7, [7, 130, 160], 399)
    assert len(check.steps) <= 65
    assert str(check) == check.report()
