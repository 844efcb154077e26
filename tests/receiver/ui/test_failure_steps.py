"""The page has the steps of all failures of a line: of logs, and of running processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.failure_report import FailureHistory
from hostcallback.receiver.failures.told_failure import told_failures
from hostcallback.receiver.ui.index.failures import MAX_STEPS, Failures
from logged_frames import LOSS, block_of, frame, log_in

Serve = Callable[..., Any]

CHECK = replace(
    LOSS, name="check", consumer_id=79, kind="check", source_line="train.py:20 (step)", transforms=(), kwargs={},
    tree=["tuple", [["array"], ["tuple", []], ["dict", [["value", "step"]], [["array"]]]]],
    params={"fmt": "bad", "has_placeholders": True, "printoptions": np.get_printoptions()},
)  # fmt: skip


def groups(client: Any) -> dict[str, Any]:
    """The groups of failures, by kind."""
    return {group["kind"]: group for group in client.get("/api/errors").raise_for_status().json()["groups"]}


@jax.jit
def step(number: Any, bad: Any) -> None:
    """A check, a tap and an operation fail in a bad step."""
    hcb.check(~bad, "bad", step=number)
    hcb.id_tap(fail, {"step": number, "bad": bad}, name="unlucky")


def fail(found: Any) -> None:
    if found["bad"]:
        raise ValueError("a planted bug")


def run(folder: Path, bad: Sequence[int], last: int) -> Path:
    """The log of that many steps."""
    with hcb.outfeed_receiver(record=folder, on_error="warn"):
        for number in range(last + 1):
            step(number, number in bad)
    return folder


def test_the_steps_of_failures_are_ranges(tmp_path: Path, serve: Serve) -> None:
    found = groups(serve(run(tmp_path, [3, 4, 5, 7, 30], 40)))
    assert found["check"]["steps"] == found["tap exception"]["steps"] == "at steps 3 to 5, 7, 30"
    for kind in "check", "tap exception":
        assert (found[kind]["first"]["step"], found[kind]["last"]["step"]) == (3, 30)


def test_of_many_steps_the_first_ranges_and_the_last_one_are_shown(tmp_path: Path, serve: Serve) -> None:
    found = groups(serve(run(tmp_path, range(0, 100, 2), 99)))
    first = ", ".join(map(str, range(0, 24, 2)))
    assert found["check"]["steps"] == f"at steps {first}, 98, and 37 more"
    assert found["tap exception"]["steps"] == f"at steps {first}, 62, and 37 more"


def test_two_failures_have_no_list(tmp_path: Path, serve: Serve) -> None:
    found = groups(serve(run(tmp_path, [3, 9], 10)))
    assert (found["check"]["count"], found["check"]["steps"]) == (2, "")
    assert (found["check"]["first"]["step"], found["check"]["last"]["step"]) == (3, 9)


@pytest.mark.native_only  # on the callback transport a message without a step may get that of another launch
def test_failures_without_a_step_are_said_to_have_none(tmp_path: Path, serve: Serve) -> None:
    def check(number: Any, **options: Any) -> None:
        hcb.check(number < 0, "bad", name="both", **options)

    with_step, without = jax.jit(lambda number: check(number, step=number)), jax.jit(check)
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        for number in range(3):
            with_step(number)
            without(number)
            hcb.barrier_wait()
    found = groups(serve(tmp_path))["check"]
    assert found["steps"] == "at steps 0 to 2, and 3 more failures, whose steps are not known"


@pytest.mark.native_only  # the callback transport does not know the launch of a message
def test_operations_that_made_nan_have_the_steps_of_their_calls(tmp_path: Path, serve: Serve) -> None:
    @jax.jit
    def train(x: Any, number: Any) -> Any:
        hcb.metrics({"x": x}, step=number)
        return jnp.log(x)

    watched = hcb.watch_nonfinite(train)
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        for number in range(20):
            watched(jnp.float32(-1 if number in (5, 6, 12) else 1), number).block_until_ready()
    found = groups(serve(tmp_path))["nonfinite"]
    assert (found["count"], found["steps"]) == (3, "at steps 5 to 6, 12")
    assert (found["first"]["step"], found["last"]["step"]) == (5, 12)


def test_more_steps_of_failures_than_are_kept_are_hinted_at(tmp_path: Path, serve: Serve) -> None:
    with log_in(tmp_path) as log:
        log.describe(CHECK)
        for first in range(0, MAX_STEPS + 64, MAX_STEPS // 2):  # in chunks, none of which has too many
            steps = range(first, min(first + MAX_STEPS // 2, MAX_STEPS + 64))
            frames = [frame(CHECK, np.bool_(False), np.int32(step), seq=step) for step in steps]
            log.append("cpu:0", block_of(*frames), at_once=True)
    found = groups(serve(tmp_path))["check"]
    assert (found["count"], found["steps"]) == (MAX_STEPS + 64, f"at steps 0 to {MAX_STEPS - 1}, and more")


def told_of(steps: Sequence[int | None]) -> list[dict[str, Any]]:
    """What a process tells of exceptions in these steps."""
    history = FailureHistory()
    for number, at in enumerate(steps):
        failure = TapFailure(ValueError("bug"), "f", "a.py:1", "cpu:0", number, time_ns=number + 1, step=at)
        history.add_exception(failure)
    return history.as_dicts()


def shown(*told: Any) -> Any:
    failures = Failures()
    for number, of_process in enumerate(told):
        for failure in told_failures(of_process):
            failures.take_live(("host", number), failure)
    return failures.as_dicts()


def test_running_processes_tell_their_steps() -> None:
    [group] = shown(told_of([3, 4, None, 9]), told_of([5, 20]))
    assert group["steps"] == "at steps 3 to 5, 9, 20, and 1 more failure, whose step is not known"
    assert group["count"] == 6
    [group] = shown(told_of([7, None, 8]))
    assert (group["first"]["step"], group["last"]["step"]) == (7, 8)
    [group] = shown(told_of(range(0, 200, 2)))
    assert group["steps"].endswith(", 22, 62, and 87 more")


def test_what_processes_of_earlier_versions_tell_has_no_steps() -> None:
    [failure] = told_of([1, 2, 3])
    for name in ("steps", "more_steps", "without_step", "first_step", "last_step"):
        del failure[name]
    [group] = shown([failure])
    assert (group["count"], group["steps"], group["first"]["step"]) == (3, "", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 5}, {"steps": [[1]]}, {"steps": [[2, 1]]}, {"steps": [[1, 2**64]]}, {"steps": [[1, True]]},
        {"steps": [[5, 6], [1, 2]]}, {"more_steps": -1},
        {"without_step": "1"}, {"first_step": 1.5}, {"last_step": 2**70},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_steps_are_refused(wrong: Any) -> None:
    [failure] = told_of([1, 2, 3])
    assert shown([failure | wrong]) == []
