"""A failed check that is raised has the step that the log of the run gives it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.cli import main
from transforming import nap


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


def test_a_check_that_names_its_step_has_it_without_a_log(caplog: pytest.LogCaptureFixture) -> None:
    step = jax.jit(lambda x, i: hcb.check(x != 5, "x is {} at {step}", x, step=i))
    for i in range(10):
        step(jnp.float32(i), jnp.int32(i))
    error = raised(hcb.barrier_wait)
    assert error.step == 5
    assert ", step 5, message " in str(error)
    assert " failed on cpu:0, step 5: x is 5.0 at 5\n" in caplog.text


@pytest.mark.native_only
def test_a_checked_step_has_it(tmp_path: Path) -> None:
    step = hcb.checked(jax.jit(before))
    with hcb.outfeed_receiver(record=tmp_path):
        for i in range(5):
            step(jnp.float32(i), jnp.int32(i))
        assert raised(lambda: step(jnp.float32(5), jnp.int32(5))).step == 5


@pytest.mark.native_only
@pytest.mark.parametrize("calls", [2, 3, 5])
def test_a_check_whose_step_comes_in_a_later_batch_has_it(calls: int, tmp_path: Path) -> None:
    def slow(x: Any, step: Any) -> Any:
        check(x, step)
        x = nap(x, 0.03)
        hcb.metrics({"loss": x}, step=step)
        return x

    step = hcb.checked(jax.jit(slow))
    with hcb.outfeed_receiver(record=tmp_path) as receiver:
        for i in range(5 - calls, 5):
            step(jnp.float32(i), jnp.int32(i))
            assert receiver.recorder is not None
            receiver.recorder.flush()  # each call in chunks that hold nothing else
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
    assert len(check.steps) + check.without_step == 203
    assert "  at steps 7, 130, 160, 200 to " in str(check)
    assert "not known" not in str(check)
    assert str(check) == check.report()


BAD = [3, 4, 5, 300, 301, 650, 998]


def fails_at(bad: Sequence[int], steps: int) -> Callable[[], Any]:
    """A scan in which a check fails at some steps, so fast that the failures wait together."""
    wrong = jnp.zeros(steps, bool).at[jnp.array(bad)].set(True)

    def one(carry: Any, i: Any) -> Any:
        hcb.check(~wrong[i], "bad", step=i)
        return carry, None

    return jax.jit(lambda: lax.scan(one, 0, jnp.arange(steps)))


def test_all_steps_of_failures_that_wait_together_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = recorded(fails_at(BAD, 1000), tmp_path)
    assert (error.check.count, error.check.steps, error.check.without_step) == (7, BAD, 0)
    assert "\n  at steps 3 to 5, 300 to 301, 650, 998\n" in str(error)
    main(["errors", str(tmp_path), "--json"])
    logged = json.loads(capsys.readouterr().out)
    assert (logged["steps"], logged["without_step"]) == (BAD, 0)
    main(["errors", str(tmp_path)])
    assert "at steps 3 to 5, 300 to 301, 650, 998\n" in capsys.readouterr().out
    main(["cat", str(tmp_path)])
    assert [int(line.split()[2]) for line in capsys.readouterr().out.splitlines()] == BAD


def test_a_list_of_steps_that_is_not_complete_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = recorded(fails_at(range(10, 2000), 2000), tmp_path)
    assert error.check.count == 1990
    assert error.check.steps[:64] == [*range(10, 74)]
    assert len(error.check.steps) + error.check.without_step == 1990
    assert "not known" not in str(error)
    assert _tells_the_rest(str(error), error.check.without_step)
    main(["errors", str(tmp_path)])
    text = read_out(capsys)
    main(["errors", str(tmp_path), "--json"])
    logged = json.loads(read_out(capsys))
    assert logged["steps"][:64] == [*range(10, 74)]
    assert len(logged["steps"]) + logged["without_step"] == 1990
    # The log takes messages while the receiver is busy, so it may list more of them, never fewer.
    assert logged["without_step"] <= error.check.without_step
    assert _tells_the_rest(text, logged["without_step"])


def _tells_the_rest(report: str, without: int) -> bool:
    if not without:
        return "\n  at steps 10 to 1999\n" in report
    return f" 1999, and {without:,} more failures, not listed (they were only counted)\n" in report


FAR = [*range(5, 1000, 5), 1000]
"""More steps than a report has ranges."""


def read_out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_the_log_of_a_loop_has_the_steps_of_many_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = jax.jit(lambda ok, i: hcb.check(ok, "bad", step=i))

    def run() -> None:
        for i in FAR:
            step(False, jnp.int32(i))
            if i % 100 == 0:
                hcb.barrier_wait()

    with hcb.outfeed_receiver(record=tmp_path, on_error="warn") as receiver:
        run()
    (check,) = receiver.failed_checks
    assert (check.steps, check.without_step) == (FAR, 0)
    assert ", 315, 320, 1000, and 135 more, not listed here (`check.steps` has them)\n" in check.report()
    main(["errors", str(tmp_path)])
    assert f"  at steps {', '.join(map(str, FAR))}\n" in read_out(capsys)
    main(["errors", str(tmp_path), "--json"])
    logged = json.loads(read_out(capsys))
    assert (logged["kind"], logged["steps"], logged["without_step"]) == ("check", FAR, 0)


def test_a_log_has_hundreds_of_failures_that_wait_together(tmp_path: Path) -> None:
    bad = [*range(100, 500)]
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn") as receiver:
        fails_at(bad, 600)()
    (check,) = receiver.failed_checks
    assert (check.steps, check.without_step) == (bad, 0)
    assert len(hcb.read(tmp_path)["check"].to_numpy()["time"]) == len(bad)
    with hcb.outfeed_receiver(on_error="warn") as without_log:
        fails_at(bad, 600)()
    assert without_log.failed_checks[0].count == len(bad)


def test_a_log_has_all_of_thousands_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def one(carry: Any, i: Any) -> Any:
        hcb.check(i % 2 != 0, "odd", name="odd", step=i)
        hcb.id_tap(lambda value: None, carry, name="between")  # so that no failures wait together
        return carry, None

    program = jax.jit(lambda: lax.scan(one, 0, jnp.arange(9000)))
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn") as receiver:
        program()
    (check,) = receiver.failed_checks
    bad = [*range(0, 9000, 2)]
    assert (check.count, check.steps, check.without_step) == (4500, [*bad[:4096], 8998], 403)
    assert "and 403 more failures, not listed (beyond 4,096 steps)\n" in check.report()
    main(["errors", str(tmp_path), "--json"])
    logged = json.loads(read_out(capsys))
    assert (logged["steps"], logged["without_step"]) == (bad, 0)
    main(["errors", str(tmp_path)])
    assert f"  at steps {', '.join(map(str, bad))}\n" in read_out(capsys)


def test_failures_that_a_receiver_without_a_log_only_counts_are_said_to_be_counted() -> None:
    with hcb.outfeed_receiver(on_error="warn") as receiver:
        fails_at(range(10, 2000), 2000)()
    (check,) = receiver.failed_checks
    assert (check.count, "hcb errors" in check.report()) == (1990, False)
    if check.without_step:  # more than are listed came together
        counted = f"and {check.without_step:,} more failures, not listed (they were only counted)\n"
        assert counted in check.report()


def test_failures_without_a_step_beside_others_are_not_known() -> None:
    @jax.jit
    def step(i: Any) -> None:
        for options in ({"step": i}, {}):
            hcb.check(i < 0, "bad", name="both", **options)

    error = raised(lambda: (step(1), step(2), hcb.barrier_wait()))
    assert (error.check.count, error.check.steps, error.check.without_step) == (4, [1, 2], 2)
    assert "  at steps 1 to 2, and 2 more failures, whose steps are not known\n" in str(error)


def test_failures_at_one_step_count_as_known() -> None:
    def one(carry: Any, i: Any) -> Any:
        hcb.check(i < 0, "bad", step=i // 4)
        return carry, None

    error = raised(lambda: (jax.jit(lambda: lax.scan(one, 0, jnp.arange(8)))(), hcb.barrier_wait()))
    assert (error.check.count, error.check.steps, error.check.without_step) == (8, [0, 1], 0)


def test_failures_without_a_step_say_that_it_is_unknown_and_what_tells_it() -> None:
    step = jax.jit(lambda x: hcb.check(x < 0, "x is {}", x))
    error = raised(lambda: (step(1.0), step(2.0), hcb.barrier_wait()))
    assert (error.check.steps, error.check.without_step) == ([], 2)
    assert "the steps are not known: hcb.check(..., step=i) tells them" in str(error)
    one = str(raised(lambda: (step(1.0), hcb.barrier_wait())))
    assert "\n  the step is not known: hcb.check(..., step=i) tells it\n" in one
    told = jax.jit(lambda x: hcb.check(x < 0, "x is {}", x, step=7))
    assert "\n  the step is not known" not in str(raised(lambda: (told(1.0), hcb.barrier_wait())))


@pytest.mark.native_only  # the callback transport does not know the launch of a message
def test_the_log_gives_each_failure_its_step(tmp_path: Path) -> None:
    def train() -> None:
        @jax.jit
        def step(ok: Any, i: Any) -> None:
            hcb.check(ok, "bad")
            hcb.metrics({"loss": 1.0}, step=i)

        for i in range(100):
            step(i not in BAD, jnp.int32(i))

    error = recorded(train, tmp_path)
    assert (error.check.count, error.check.steps, error.check.without_step) == (3, [3, 4, 5], 0)


@pytest.mark.native_only
def test_a_report_says_that_the_log_may_have_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @jax.jit
    def step(i: Any) -> None:
        hcb.check(i < 0, "bad")
        hcb.metrics({"loss": 1.0}, step=i)

    error = recorded(lambda: [step(jnp.int32(i)) for i in range(200)], tmp_path)
    missing = error.check.without_step
    assert (error.check.count, len(error.check.steps) + missing) == (200, 200)
    assert missing > 0
    assert f"and {missing} more failures, not listed (`hcb errors LOG` may have them)\n" in str(error)
    main(["errors", str(tmp_path), "--json"])
    logged = json.loads(read_out(capsys))
    assert (logged["steps"], logged["without_step"]) == ([*range(200)], 0)
