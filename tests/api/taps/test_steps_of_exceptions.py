"""An exception of a tap function has the step of its message: its own, or that which the receiver's log shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from hostcallback.receiver.cli import main

BAD = [3, 4, 11]


def fail(value: Any) -> None:
    if value["bad"]:
        raise ValueError("a planted bug")


def raised(program: Any, **options: Any) -> tuple[hcb.TapFailure, ...]:
    def run() -> None:
        with hcb.outfeed_receiver(**options):
            for number in range(15):
                program(number in BAD, jnp.int32(number))

    with pytest.raises(hcb.TapFunctionException) as caught:
        run()
    return tuple(caught.value.failures)


@jax.jit
def own(bad: Any, number: Any) -> None:
    hcb.id_tap(fail, {"bad": bad, "step": number}, name="unlucky")


@jax.jit
def beside(bad: Any, number: Any) -> None:
    hcb.id_tap(fail, {"bad": bad}, name="unlucky")
    hcb.metrics({"loss": 1.0}, step=number)


def test_a_message_that_has_its_step_needs_no_log() -> None:
    assert [failure.step for failure in raised(own)] == BAD


@pytest.mark.parametrize(
    "program",
    [
        own,
        pytest.param(beside, marks=pytest.mark.native_only),
    ],  # callbacks do not know the launch of a message
)
def test_the_log_and_what_is_raised_have_the_steps(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [failure.step for failure in raised(program, record=tmp_path)] == BAD
    main(["errors", str(tmp_path)])
    assert "\n  at steps 3 to 4, 11\n" in capsys.readouterr().out
    main(["errors", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["more_steps"], found["without_step"]) == (BAD, 0, 0)
    assert (found["first"]["step"], found["last"]["step"]) == (3, 11)
    for steps, is_in in ("4:10", True), (":2", False), ("5:10", False), ("11", True):
        main(["errors", str(tmp_path), "--step", steps])
        assert ("a planted bug" in capsys.readouterr().out) == is_in


def test_a_barrier_finds_the_steps_too(tmp_path: Path) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        own(True, 7)
        with pytest.raises(hcb.TapFunctionException) as caught:
            hcb.barrier_wait()
    assert [failure.step for failure in caught.value.failures] == [7]


def test_without_a_step_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = jax.jit(lambda bad, number: hcb.id_tap(fail, {"bad": bad}, name="unlucky"))
    assert [failure.step for failure in raised(program, record=tmp_path)] == [None] * 3
    main(["errors", str(tmp_path)])
    assert "step" not in capsys.readouterr().out.partition("exceptions (")[2].partition("Traceback")[0]
