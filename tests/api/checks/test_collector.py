"""Failed checks are gathered by line, bounded, and raised, logged or made to end the program, as the user chooses."""

from __future__ import annotations

import contextlib
import logging
import re
import textwrap
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from failing import failed_once
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from hostcallback.receiver.failures.failure_report import failure_history
from python_process import python_output
from transforming import Jit


def positive(x: Any) -> Any:
    hcb.check(x > 0, "x is {}", x)
    return x


def checks_of(error: hcb.TapFunctionException) -> list[hcb.FailedCheck]:
    return [e.check for e in error.exceptions if isinstance(e, hcb.CheckError)]


def often(f: Any) -> None:
    """A failure is counted before it is announced: the call that raises need not be the first one."""
    end = monotonic() + 30
    while monotonic() < end:
        f(1.0)


def fail_and_go_on(f: Any) -> None:
    """The call that fails may raise itself if its program has run when it returns."""
    f(-1.0)
    often(f)


def test_failures_are_raised_on_leaving_a_collector_one_for_each_line(jit: Jit) -> None:
    def f(x: Any) -> Any:
        hcb.check(x > 1, "above one: {}", x)
        return positive(x)

    compiled = jit(f)

    def run(errors: hcb.OutfeedReceiver) -> None:
        for x in (0.5, 0.5, -1.0, 2.0):
            compiled(x)
        while len(errors.failed_checks) < 2 or errors.failed_checks[0].count < 3:
            pass
        assert [check.count for check in errors.failed_checks] == [3, 1]

    with pytest.raises(hcb.TapFunctionException) as caught, hcb.error_collector() as errors:
        run(errors)
    first, second = checks_of(caught.value)
    assert (first.explanation.text, first.count) == ("above one: 0.5", 3)
    assert (second.explanation.text, second.count) == ("x is -1.0", 1)
    assert str(caught.value).startswith("2 check(s) failed, 4 time(s) in all; the first: above one: 0.5, at ")
    assert "this was the first of 2 checks that failed" in str(caught.value.exceptions[0])
    assert "ms after the first failure, of the check at" in str(caught.value.exceptions[1])
    hcb.barrier_wait()


def test_a_tap_error_is_reported_together_with_failed_checks(jit: Jit) -> None:
    def bad(x: Any) -> None:
        raise KeyError("tap")

    jit(lambda x: hcb.id_tap(bad, positive(x)))(-1.0)
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert [type(e) for e in caught.value.exceptions] == [hcb.CheckError, KeyError]
    assert "1 check(s) failed" in str(caught.value)
    assert "1 tap function call(s) raised" in str(caught.value)


def test_failed_checks_are_told_to_those_who_ask_the_process(jit: Jit) -> None:
    failure_history.clear()
    with hcb.outfeed_receiver(on_error="warn"):
        for x in (-1.0, 2.0, -3.0):
            jit(positive)(x)
    [told] = failure_history.as_dicts()
    assert (told["kind"], told["title"], told["by_device"]) == ("check", "x is -1.0", {"cpu:0": 2})


def test_warnings_are_logged_once_a_line_with_file_and_line_and_never_raised(
    jit: Jit, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = jit(positive)
    with caplog.at_level(logging.WARNING, "hostcallback"), hcb.outfeed_receiver(on_error="warn"):
        for x in (-1.0, -2.0, -3.0):
            compiled(x)
    first, summary = caplog.records
    assert first.name == "hostcallback"
    assert first.pathname.endswith("test_collector.py")
    assert first.funcName == "positive"
    assert first.getMessage().startswith("check failed: x is -1.0, at ")
    assert first.check["message"] == "x is -1.0"  # type: ignore[attr-defined]
    assert summary.getMessage().startswith("1 check(s) failed, 3 time(s) in all")


def test_raise_soon_raises_in_the_next_call_of_a_tapped_program() -> None:
    compiled = jax.jit(positive)
    with hcb.outfeed_receiver(on_error="raise_soon"):
        with pytest.raises(hcb.TapFunctionException) as caught:
            fail_and_go_on(compiled)
        assert checks_of(caught.value)[0].explanation.text == "x is -1.0"
        compiled(2.0)


def test_raise_soon_raises_in_a_thread_that_has_left_a_setting_of_jax_before_the_first_receiver() -> None:
    program = """
    import threading, time
    import jax

    with jax.debug_nans(False):  # from then on, JAX calls no hook on this thread
        pass

    import hostcallback as hcb

    @jax.jit
    def step(x):
        hcb.check(x > 0, "x is {}", x)
        return x

    with hcb.outfeed_receiver(on_error="raise_soon") as receiver:
        step(-1.0)
        while not receiver.failed_checks:
            threading.Event().wait(0.001)
        try:
            end = time.monotonic() + 20  # the receiver's thread may tell the failure first
            while time.monotonic() < end:
                step(1.0)
            print("went on")
        except hcb.TapFunctionException:
            print("raised")
    """
    assert python_output("-c", textwrap.dedent(program)) == "raised\n"


def test_later_failures_of_what_raise_soon_has_raised_are_not_reported_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    never = threading.Event()

    def body(i: Any, x: Any) -> Any:
        hcb.check(x > 0, "x is {}", x)
        hcb.id_tap(lambda _: never.wait(0.002), x)  # failures are still queued when the first one is raised
        return x

    many = jax.jit(lambda x: lax.fori_loop(0, 50, body, x))

    def train() -> None:
        with hcb.outfeed_receiver(on_error="raise_soon"):
            for _ in range(1000):
                many(-1.0).block_until_ready()
                never.wait(0.01)

    with pytest.raises(hcb.TapFunctionException) as caught:
        train()
    assert "x is -1.0" in str(caught.value)
    assert any(note.startswith("meanwhile in the receiver: ") for note in caught.value.__notes__)
    assert "while the receiver was closing" not in caplog.text


def test_raise_soon_raises_in_whichever_thread_calls_next_but_never_in_a_tap() -> None:
    seen: list[Any] = []
    inner = hcb.jit(lambda x: hcb.id_tap(lambda v: None, x))
    go = threading.Event()

    def tap(x: Any) -> None:
        go.wait()
        try:
            inner(1.0)
            seen.append("went on")
        except BaseException as error:
            seen.append(error)

    with hcb.outfeed_receiver(on_error="raise_soon") as rx:
        hcb.jit(lambda x: hcb.id_tap(tap, positive(x)))(-1.0)
        while not rx.failed_checks:
            pass
        go.set()
        while not seen:
            pass
        assert seen == ["went on"]
        with pytest.raises(hcb.TapFunctionException):
            often(inner)


def test_abort_ends_a_loop_that_would_never_end() -> None:
    endless = jax.jit(
        lambda x: lax.while_loop(
            lambda c: True, lambda c: (hcb.check(c < 1000, "still running at {}", c), c + 1)[1], x
        )
    )
    with pytest.raises(
        hcb.TapFunctionException, match=r"1 time\(s\) in all; the first: still running at 1000"
    ) as caught:
        with hcb.outfeed_receiver(on_error="abort"):
            jax.block_until_ready(endless(0))
    (check,) = checks_of(caught.value)
    assert __file__ in check.source_line
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError | ValueError)
    assert "a check failed" in str(caught.value.__cause__)
    assert float(jax.jit(positive)(3.0)) == 3  # the next program works
    hcb.barrier_wait()
    jax.jit(positive)(-3.0)  # and is not ended by a failing check any more
    assert failed_once().count == 1


def endless_on_all_devices() -> Any:
    """Counts on each device without end; its check fails at 50."""
    mesh = Mesh(jax.devices(), ("i",))

    def f(x: Any) -> Any:
        def body(c: Any) -> Any:
            hcb.id_tap(lambda v: None, c)
            hcb.check(jnp.all(c != 50), "at {}", c)
            return c + 1

        return lax.while_loop(lambda c: True, body, x)

    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")))


def test_abort_ends_endless_loops_on_all_devices() -> None:
    endless = endless_on_all_devices()
    # On the callback transport a launch has no number, so that each device has to fail separately.
    with pytest.raises(hcb.TapFunctionException, match=r"check\(s\) failed"):
        with hcb.outfeed_receiver(on_error="abort"):
            jax.block_until_ready(endless(jnp.arange(4)))
    positive(1.0)
    hcb.barrier_wait()


@pytest.mark.native_only
def test_abort_on_one_device_ends_the_others_at_their_next_tap() -> None:
    endless = endless_on_all_devices()
    with pytest.raises(hcb.TapFunctionException, match=r"1 check\(s\) failed"):
        with hcb.outfeed_receiver(on_error="abort"):
            # Only the first device reaches 50 soon; the others run for hours.
            jax.block_until_ready(endless(jnp.array([0, 100, 100, 100])))


def test_an_error_of_the_block_that_no_check_caused_goes_on_under_abort() -> None:
    with pytest.raises(KeyError) as caught, hcb.outfeed_receiver(on_error="abort"):  # noqa: PT012
        with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
            jax.block_until_ready(jax.jit(positive)(-1.0))
        raise KeyError("mine")
    assert "1 check(s) failed" in "".join(caught.value.__notes__)


def test_failures_beyond_the_kept_bound_are_counted_by_line() -> None:
    def run() -> None:
        for x in (-1.0, -2.0):
            hcb.check(x > 0, "one {}", x)
            hcb.check(x > 0, "two {}", x)
            hcb.check(x > 0, "three {}", x)
            hcb.check(x > 0, "four {}", x)

    with pytest.raises(hcb.TapFunctionException) as caught, hcb.error_collector(max_errors=2):
        run()
    checks = checks_of(caught.value)
    assert [(check.explanation.text, check.count) for check in checks] == [("one -1.0", 2), ("two -1.0", 2)]
    assert str(caught.value).startswith("2 check(s) failed, 8 time(s) in all")
    told = str(caught.value.exceptions[0])
    assert "beyond the limit of 2 checks, failures were only counted: 2 at " in told


def test_two_collectors_on_one_device_are_refused() -> None:
    with hcb.error_collector():
        with pytest.raises(hcb.DeviceClaimedError, match="already has the receiver 'error collector'"):
            with hcb.error_collector():
                pass
    with hcb.error_collector(devices=jax.devices()[:1]), hcb.error_collector(devices=jax.devices()[1:2]):
        pass


@pytest.mark.parametrize("collector_first", [False, True])
def test_a_collector_and_a_receiver_are_refused_with_the_cure(collector_first: bool, tmp_path: Path) -> None:
    made = [hcb.outfeed_receiver(record=tmp_path), hcb.error_collector(on_error="warn")]
    first, second = made[::-1] if collector_first else made
    with first, pytest.raises(hcb.DeviceClaimedError) as claimed:
        second.__enter__()
    told = "".join(claimed.value.__notes__)
    assert 'outfeed_receiver(record=..., on_error="warn") as rx, whose rx.failed_checks' in told


@pytest.mark.parametrize("make", [hcb.outfeed_receiver, hcb.error_collector])
def test_an_unknown_policy_is_refused_with_the_line(make: Any) -> None:
    with pytest.raises(ValueError, match="on_error") as refused:
        make(on_error="raise")
    policies = r"'defer', 'warn', 'raise_soon', 'abort', 'stop'"
    place = rf"{re.escape(__file__)}:\d+ \(test_an_unknown_policy_is_refused_with_the_line\)"
    assert re.fullmatch(rf"on_error is 'raise', expected one of {policies}, at {place}", str(refused.value))


@pytest.mark.slow
def test_a_thousand_checks_in_one_program_are_collected() -> None:
    def f(x: Any) -> Any:
        for i in range(1000):
            hcb.check(x != i, "number {}", i, name=f"check {i}")
            x = x + 0
        return x

    compiled = jax.jit(f)
    for i in (3, 700):
        compiled(float(i))
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert [check.name for check in checks_of(caught.value)] == ["check 3", "check 700"]
