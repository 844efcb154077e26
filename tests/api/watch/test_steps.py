"""A step with a test of its results: the calls that fail, what the report says of them, and what it costs."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import watching
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from watching import call, errors_of, line_of

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.runtime.runtime import runtime

ONES = jnp.ones(4)


def with_zero_at(call: int, number: int = 6) -> Iterator[Any]:
    """Arguments of `number` calls; those of one of them have a zero."""
    for i in range(number):
        yield ONES.at[2].set(float(i != call))


def run_of(step: Any, call: int = 3, number: int = 6) -> None:
    w = ONES + 0  # the step may take its memory
    for x in with_zero_at(call, number):
        w, *_ = step(w, x)


def log_step(w: Any, x: Any) -> Any:
    with jax.named_scope("attention"):
        y = jnp.log(x)  # log step
    return w - y, y.sum()


def test_the_report_names_operation_line_scope_and_call() -> None:
    step = hcb.watch_nonfinite(jax.jit(log_step))
    (error,) = errors_of(lambda: run_of(step))
    assert (error.primitive, error.scope, error.inf_count) == ("log", "attention", 1)
    assert error.source_line.line == line_of(__file__, "log step")
    assert (error.call, error.iteration, error.reproduced) == (call(3), (), True)
    assert ("in scope attention, call 3 of log_step" in str(error)) == (call(3) == 3)
    assert error.check.count == 3, "later calls only pass it on"


def test_a_failure_names_which_compilation_of_the_function_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(calls: set[int]) -> None:
        with hcb.outfeed_receiver(record=tmp_path / f"{min(calls)}"):
            for i in range(8):
                step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x)))
                step(jnp.ones(i + 2).at[i].set(float(i not in calls)))

    def failing_of(calls: set[int]) -> hcb.NonFiniteError:
        with pytest.raises(hcb.TapFunctionException) as caught:
            run(calls)
        (error,) = caught.value.exceptions
        assert isinstance(error, hcb.NonFiniteError)
        return error

    first, second = failing_of({5}), failing_of({2, 4})
    assert (first.call, second.call) == (call(0), call(0))
    assert (
        second.compilation == first.compilation + 5
    )  # the other two of the first run, and three of the second
    assert f"(compilation {second.compilation})" in str(second)
    assert second.check.as_dict()["details"]["compilation"] == second.compilation
    main(["cat", str(tmp_path / "2")])
    told = [line for line in capsys.readouterr().out.splitlines() if "log: " in line]
    assert [re.findall(r"\(compilation (\d+)\)", line) for line in told] == [
        [str(second.compilation)],
        [str(second.compilation + 2)],
    ]


def test_operations_of_one_line_that_fail_in_different_calls_have_a_report_each() -> None:
    step = jax.jit(lambda x, z: (x / (x + 0.0)) + (z / (z * 2.0)))
    ones, zeros = jnp.ones, jnp.zeros
    with hcb.outfeed_receiver(on_error="warn") as receiver, hcb.watch_nonfinite():
        for shape in ((), (3,)):  # compiled again: the places are the same
            for x, z in ((ones, zeros), (zeros, ones)):
                step(x(shape), z(shape))
                hcb.barrier_wait()
    reports = receiver.failed_checks
    assert [(check.name, check.part, check.count) for check in reports] == [("div", 1, 2), ("div", 0, 2)]
    assert len({check.source_line for check in reports}) == 1


def test_operations_in_a_shard_map_in_a_loop_are_numbered_by_their_places() -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def part(x: Any, z: Any) -> Any:
        return (x / (x + 0.0)) + (z / (z * 2.0))

    mapped = jax.shard_map(part, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    step = jax.jit(lambda x, z: lax.fori_loop(0, 3, lambda i, y: y * 0 + mapped(x, z), x))
    ones, zeros = jnp.ones(len(jax.devices())), jnp.zeros(len(jax.devices()))
    with hcb.outfeed_receiver(on_error="warn") as receiver, hcb.watch_nonfinite():
        for x, z in ((ones, zeros), (zeros, ones)):
            step(x, z)
            hcb.barrier_wait()
    reports = receiver.failed_checks
    assert [(check.name, check.part) for check in reports] == [("div", 1), ("div", 0)]


def test_every_reports_a_failure_before_a_loop_in_which_nothing_fails() -> None:
    @jax.jit
    def step(x):
        finite = jnp.where(x > 0, jnp.log(x), 0.0)
        return lax.scan(lambda carry, each: (jnp.sin(carry + each), None), jnp.float32(0), finite)[0]

    watched = hcb.watch_nonfinite(step, mode="every")
    (error,) = errors_of(lambda: watched(jnp.array([-1.0, 2.0, 3.0])))
    assert (error.primitive, error.nan_count) == ("log", 1)


def test_a_step_that_stays_finite_is_not_run_again() -> None:
    traces = []

    @jax.jit
    def step(w, x):
        traces.append(x)
        return w * x, None

    assert errors_of(lambda: run_of(hcb.watch_nonfinite(step), call=-1)) == []
    assert len(traces) == 1


def test_failed_calls_are_counted_and_the_one_after_a_recovery_is_looked_into() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: (jnp.log(x), jnp.sqrt(x - 1), x + 1)))
    negative, half, good = -ONES, ONES * 0.5, ONES
    errors = errors_of(lambda: [step(x) for x in (good, half, half, good, negative, good)])
    # Where nothing counts calls, that other one is only counted.
    found = [("sqrt", 1, 3), ("log", 4, 1)] if call(1) else [("sqrt", None, 3)]
    assert [(e.primitive, e.call, e.check.count) for e in errors] == found


def test_a_failure_is_reported_again_after_a_barrier() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x)))
    for _ in range(2):
        assert [error.primitive for error in errors_of(lambda: step(-ONES))] == ["log"]


def test_a_mask_in_the_results_hides_nothing() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: (jnp.where(x > 0, 0.0, -jnp.inf)[:2], jnp.log(x))))
    assert not errors_of(lambda: step(ONES.at[0].set(0)[1:]))
    (error,) = errors_of(lambda: [step(x) for x in (ONES, ONES, ONES.at[3].set(-1))])
    assert (error.primitive, error.nan_count) == ("log", 1)


@jax.custom_vjp
def divided_backward(h: Any, x: Any) -> Any:
    return h + x


def _divided(ct: Any, x: Any) -> Any:
    return ct / x, jnp.zeros_like(x)


divided_backward.defvjp(lambda h, x: (divided_backward(h, x), x), lambda x, ct: _divided(ct, x))


def test_backward_pass_and_iteration() -> None:
    def loss(w, x):
        return lax.scan(lambda h, y: (divided_backward(h, y), None), w.sum(), x)[0]  # backward step

    step = hcb.watch_nonfinite(jax.jit(lambda w, x: (w - jax.grad(loss)(w, x), None)))
    first = errors_of(lambda: run_of(step))[0]
    assert (first.backward, first.call, first.iteration) == (True, call(3), (2,))
    assert first.source_line.line == line_of(__file__, "backward step")


def test_a_long_walk_is_no_stalled_tap() -> None:
    def work(_: Any) -> None:
        with runtime.working():
            threading.Event().wait(0.6)

    with hcb.outfeed_receiver(timeout_sec=0.2):
        hcb.tap(work, ONES)


def test_a_vmapped_step() -> None:
    step = hcb.watch_nonfinite(jax.jit(jax.vmap(lambda w, x: (w + jnp.log(x), None))))
    (error,) = errors_of(lambda: run_of(step))
    assert (error.primitive, error.shape, error.call) == ("log", (4,), call(3))


def test_donated_arguments_are_kept_until_the_verdict() -> None:
    step = hcb.watch_nonfinite(jax.jit(log_step, donate_argnums=0))
    (error,) = errors_of(lambda: run_of(step))
    assert (error.primitive, error.call, error.reproduced) == ("log", call(3), True)


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    ("call", "donate"), [(17, ()), (64, (0,)), (63, (0, 1)), (1, (0,)), (0, (0, 1)), (70, ())], ids=str
)
def test_a_call_of_a_long_run_is_found(call: int, donate: tuple[int, ...]) -> None:
    def fun(state: Any, x: Any, *, scale: float) -> Any:
        w, key = state
        return (w * 1.25 - jnp.log(x) * scale, jax.random.split(key)[0]), x + w.sum()

    step = hcb.watch_nonfinite(jax.jit(fun, donate_argnums=donate))
    state = ONES + 0, jax.random.key(1)

    def run() -> None:
        nonlocal state
        for x in with_zero_at(call, 72):
            given = state
            state, _ = step(state, x, scale=0.5)
            assert given[0].is_deleted() == bool(donate)

    errors = errors_of(run)
    first = [(error.primitive, error.call, error.reproduced) for error in errors][:1]
    assert first == [("log", watching.call(call), True)]


def test_numpy_arrays_may_be_filled_anew() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda w, x: w - jnp.log(x)))

    def run() -> None:
        batch = np.ones(4, np.float32)
        for i in range(5):
            batch[:] = i != 2
            step(ONES, batch)

    (error,) = errors_of(run)
    assert (error.call, error.reproduced, error.inf_count) == (call(2), True, 4)


@pytest.mark.parametrize("how", ["shard_map", "sharded"])
def test_on_several_devices(how: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, P("i"))

    def part(w, x):
        return w + jnp.log(x), None

    if how == "shard_map":
        fun = jax.jit(
            lambda w, x: (
                jax.shard_map(lambda *a: part(*a)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"))(w, x),
                None,
            )
        )
    else:
        fun = jax.jit(part)
    step = hcb.watch_nonfinite(fun)
    w, ones = (jax.device_put(jnp.ones(2 * len(jax.devices())), sharding) for _ in range(2))
    errors = errors_of(lambda: [step(w, x) for x in (ones, jax.device_put(ones.at[0].set(0), sharding))])
    # Calls are not counted where the program has several devices.
    assert [(error.primitive, error.call, error.inf_count) for error in errors] == [("log", None, 1)]


def test_a_second_run_that_makes_other_results_is_reported_as_such() -> None:
    calls = []

    def draw(x):  # finite, except in the second call
        calls.append(x)
        return np.float32(np.inf if len(calls) == 2 else 1.0)

    @jax.jit
    def step(x):
        return x + jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32), x[0])  # draw

    (error,) = errors_of(
        lambda: [hcb_step(ONES) for hcb_step in [hcb.watch_nonfinite(step)] for _ in range(3)]
    )
    assert (error.call, error.reproduced, error.primitive) == (call(1), False, "result")
    assert f"pure_callback at {__file__}:{line_of(__file__, 'draw')}" in str(error)


def test_taps_and_prints_happen_once() -> None:
    seen: list[Any] = []

    @jax.jit
    def step(w, x):
        hcb.tap(seen.append, x[2])
        jax.debug.callback(lambda v: seen.append(v), x[2])
        hcb.check(x[2] >= 0, "never fails")
        return w + jnp.log(x), None

    (error,) = errors_of(lambda: run_of(hcb.watch_nonfinite(step)))
    jax.effects_barrier()
    assert error.primitive == "log"
    assert len(seen) == 12


def test_a_callback_with_results_is_not_called_again() -> None:
    calls = []

    def read(x):
        calls.append(x)
        return np.float32(0)

    @jax.jit
    def step(x):
        return jnp.log(io_callback(read, jax.ShapeDtypeStruct((), jnp.float32), x[0]))  # read

    (error,) = errors_of(lambda: hcb.watch_nonfinite(step)(ONES))
    assert len(calls) == 1
    assert f"would repeat io_callback at {__file__}:{line_of(__file__, 'read')}" in str(error)
    numbers_that_are_not_known = (error.nan_count, error.inf_count)
    assert (error.reproduced, numbers_that_are_not_known) == (False, (0, 0))


def test_static_arguments_and_other_leaves() -> None:
    fun = jax.jit(lambda x, how, scale=1.0: getattr(jnp, how)(x) * scale, static_argnums=1)
    step = hcb.watch_nonfinite(fun)
    (error,) = errors_of(lambda: (step(ONES, "exp", scale=2), step(ONES * 0, "log", scale=2)))
    assert (error.primitive, error.call) == ("log", call(0)), "another program"


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(
        ValueError, match=r"mode is 'once', expected 'results' or 'every', at .*test_steps\.py"
    ):
        hcb.watch_nonfinite(jnp.log, mode="once")  # type: ignore[arg-type]


def test_a_program_that_returns_a_number_of_its_own_is_watched() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: (0.0, jnp.log(x), np.float32(2))))
    (error,) = errors_of(lambda: step(-jnp.ones(4)))
    assert error.primitive == "log"
