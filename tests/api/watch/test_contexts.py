"""`with watch_nonfinite()`: which programs it watches, on which threads, under which settings of JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import errors_of

import hostcallback as hcb
from hostcallback.receiver.runtime.dispatch.scope import never_entered
from threads import in_another_thread, in_threads

ONES = jnp.ones(4)


def primitives(run: Any) -> list[str]:
    return [error.primitive for error in errors_of(run)]


def in_context(run: Any, **options: Any) -> Any:
    def watched() -> None:
        with hcb.watch_nonfinite(**options):
            run()

    return watched


def test_every_program_of_the_block_is_watched_and_none_after_it() -> None:
    log, sqrt = jax.jit(lambda x: jnp.log(x)), jax.jit(lambda x: jnp.sqrt(x))
    assert not errors_of(lambda: log(-ONES))
    assert set(primitives(in_context(lambda: (log(-ONES), sqrt(-ONES))))) == {"log", "sqrt"}
    assert not errors_of(lambda: log(-ONES))


def test_a_block_with_options_is_a_decorator(tmp_path: Path) -> None:
    @hcb.watch_nonfinite(mode="every")
    @jax.jit
    def step(x: Any) -> Any:
        return jnp.where(x > 0, jnp.log(x), 0.0)

    @hcb.capsule(tmp_path, nonfinite=True)
    @jax.jit
    def root(x: Any) -> Any:
        return jnp.sqrt(x)

    tables: list[Any] = []

    @hcb.observe(where="log", what="value", tap_func=tables.append)
    @jax.jit
    def logarithm(x: Any) -> Any:
        return jnp.log(x)

    assert step.__name__ == "step"
    assert set(primitives(lambda: (step(-ONES), root(-ONES), logarithm(ONES)))) == {"log", "sqrt"}
    assert [path.suffix for path in tmp_path.iterdir()] == [".hcb"]
    assert len(tables) == 1


def test_a_block_that_is_called_with_something_else_says_what_it_is() -> None:
    with pytest.raises(
        TypeError, match=r"is a `with` block or a decorator of a function, got .*step = hcb\."
    ):
        hcb.watch_nonfinite()(jnp.ones(2))
    compiled = jax.jit(jnp.log).lower(ONES).compile()
    with pytest.raises(TypeError, match="compiled ahead of time"):
        hcb.watch_nonfinite()(compiled)


def makes_values() -> Any:
    yield jnp.log(-ONES)


async def awaits_values() -> Any:
    return jnp.log(-ONES)


@pytest.mark.parametrize("function", [makes_values, awaits_values], ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "wrap",
    [
        hcb.watch_nonfinite,
        hcb.checked,
        lambda f: hcb.observe(f, where="log"),
        lambda f: hcb.capsule(f, "capsules"),
        lambda f: hcb.watch_nonfinite()(f),
    ],
    ids=["watch_nonfinite", "checked", "observe", "capsule", "decorator"],
)
def test_a_function_whose_body_runs_after_its_call_is_refused(wrap: Any, function: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"{function.__name__}, whose body runs after .*, at .*test_contexts"
    ):
        wrap(function)
    assert not [told for told in never_entered.values() if "test_contexts" in str(told)]  # said once


def test_a_function_is_traced_as_often_as_without() -> None:
    traces = []

    @jax.jit
    def step(x):
        traces.append(x)
        return jnp.log(x)

    errors_of(in_context(lambda: [step(x) for x in (ONES, -ONES, ONES)]))
    assert len(traces) == 1
    errors_of(in_context(lambda: step(ONES)))
    assert len(traces) == 1, "programs of an equal context are used again"


@pytest.mark.parametrize("everywhere", [True, False])
def test_programs_of_other_threads(everywhere: bool) -> None:
    step = jax.jit(lambda x: jnp.log(x))

    def run() -> None:
        in_another_thread(lambda: step(-ONES).block_until_ready())

    assert primitives(in_context(run, all_threads=everywhere)) == ["log"] * everywhere


def test_several_threads_call_one_step() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x)))

    def work(number: int) -> None:
        for i in range(20):
            step(ONES * (i != 7 + number)).block_until_ready()

    (error,) = errors_of(lambda: in_threads(work, 4))
    assert (error.primitive, error.reproduced) == ("log", True)
    assert error.check.count == 4


def test_without_jit_and_under_leak_checks_and_transfer_guards() -> None:
    step = jax.jit(lambda x, y: jnp.sum(lax.scan(lambda c, z: (c, jnp.log(z)), 0.0, x)[1]) + y)
    x, y = -ONES, jnp.float32(1)
    with jax.disable_jit():
        assert primitives(in_context(lambda: step(x, y))) == ["log"]
    with jax.checking_leaks():
        assert primitives(in_context(lambda: step(x, y))) == ["log"]
    with jax.transfer_guard("disallow"):
        assert primitives(in_context(lambda: step(x, y))) == ["log"]
    with jax.enable_x64(True):
        assert primitives(in_context(lambda: step(x.astype(jnp.float64), jnp.float64(1)))) == ["log"]


def test_jaxs_transfer_guard_of_the_process_does_not_end_the_walk() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(lax.cumsum(x))))
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        assert primitives(lambda: step(jax.device_put(np.zeros(4, np.float32)))) == ["log"]
    finally:
        jax.config.update("jax_transfer_guard", before)


def test_a_program_that_is_compiled_already_is_not_watched() -> None:
    compiled = jax.jit(lambda x: jnp.log(x)).lower(ONES).compile()
    assert not errors_of(in_context(lambda: compiled(-ONES)))
    with hcb.watch_nonfinite():
        compiled = jax.jit(lambda x: jnp.log(x)).lower(ONES).compile()
    assert primitives(lambda: compiled(-ONES)) == ["log"]


@pytest.mark.slow
def test_inputs_larger_than_the_queue() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x).sum()))
    big = jnp.ones(24 << 20).at[12345].set(-1)  # 96 MiB
    try:
        with hcb.outfeed_receiver():
            step(big)
    except* hcb.NonFiniteError as group:
        (error,) = group.exceptions
    assert (error.primitive, error.check.explanation.elements) == ("log", (12345,))


def test_keys_and_small_types_among_the_inputs() -> None:
    def f(key, x, n):
        return jax.random.normal(key, (4,)) + jnp.log(x.astype(jnp.float32)) + n.astype(jnp.float32)

    step = hcb.watch_nonfinite(jax.jit(f))
    args = jax.random.key(0), jnp.zeros(4, jnp.bfloat16), jnp.ones(4, jnp.int4)
    assert primitives(lambda: step(*args)) == ["log"]


def test_what_reaches_no_result_is_found_by_a_test_of_every_operation() -> None:
    step = jax.jit(lambda x: jnp.where(x > 0, jnp.log(x), 0))
    assert not errors_of(in_context(lambda: step(-ONES)))
    assert primitives(in_context(lambda: step(-ONES), mode="every")) == ["log"]


def test_a_pmap() -> None:
    devices = len(jax.devices())
    step = hcb.watch_nonfinite(jax.pmap(lambda x: lax.psum(jnp.log(x), "i"), axis_name="i"))
    errors = errors_of(lambda: step(jnp.ones((devices, 4)).at[1, 2].set(0)))
    assert errors


@pytest.mark.parametrize(
    ("off", "on"), [([-ONES], [ONES, -ONES]), ([-ONES, -ONES], [-ONES])], ids=["new failure", "goes on"]
)
def test_reports_that_are_switched_off_and_on(off: list[Any], on: list[Any]) -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x)))
    hcb.disable_checks("watch_nonfinite")
    try:
        assert not errors_of(lambda: [step(x) for x in off])
    finally:
        hcb.enable_checks("watch_nonfinite")
    assert primitives(lambda: [step(x) for x in on]) == ["log"]


def test_the_failure_of_a_tap_in_the_program_is_as_without() -> None:
    @jax.jit
    def step(x):
        hcb.check(x[0] > 0, "negative")
        return jnp.log(x)

    errors = errors_of(lambda: hcb.watch_nonfinite(step)(-ONES))
    assert [type(error) for error in errors] == [hcb.CheckError, hcb.NonFiniteError]


@pytest.mark.parametrize("policy", ["abort", "raise_soon"])
def test_policies_hold_for_watched_programs(policy: Any) -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda x: jnp.log(x * 2)))
    with pytest.raises(hcb.TapFunctionException) as raised, hcb.outfeed_receiver(on_error=policy):
        step(-ONES).block_until_ready()
    assert raised.value.exceptions[0].primitive == "log"


def test_another_failure_after_a_barrier_is_named() -> None:
    step = hcb.watch_nonfinite(jax.jit(lambda a, b: jnp.log(a) + 1 / b))
    found = []
    with hcb.outfeed_receiver():
        for a, b in ((-1.0, 1.0), (1.0, 0.0)):
            step(a, b)
            try:
                hcb.barrier_wait()
            except* hcb.NonFiniteError as group:
                found += [error.primitive for error in group.exceptions]
    assert found == ["log", "div"]


@pytest.mark.parametrize("mode", ["results", "every"])
def test_programs_that_a_tap_function_runs_in_its_block_are_watched(mode: Any) -> None:
    def tap_func(x: Any) -> None:
        with hcb.watch_nonfinite(mode=mode):
            jax.jit(lambda x: jnp.log(x) * 2)(x)

    assert primitives(lambda: jax.jit(lambda x: hcb.id_tap(tap_func, x))(-ONES)) == ["log"]


def test_a_watched_function_is_watched_though_a_tap_function_calls_it_first() -> None:
    step = jax.jit(hcb.watch_nonfinite(lambda x: jnp.log(x) * 2))

    def tap_func(x: Any) -> None:
        step(x)

    assert primitives(lambda: jax.jit(lambda x: hcb.id_tap(tap_func, x))(-ONES)) == ["log"]
    assert primitives(lambda: step(-ONES)) == ["log"]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("how", ["tap function", "host function"])
def test_a_function_that_a_host_function_called_first_is_watched_when_the_block_calls_it(
    how: str, everywhere: bool
) -> None:
    log = jax.jit(lambda x: jnp.log(x))

    @jax.jit
    def step(x: Any) -> Any:
        if how == "tap function":
            hcb.tap(log, x)
            return x
        return hcb.call(log, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))

    def run() -> None:
        step(ONES).block_until_ready()
        hcb.barrier_wait()
        log(-ONES)

    step(ONES)  # the receiver thread runs before the block is entered
    assert primitives(in_context(run, all_threads=everywhere)) == ["log"]


def test_what_a_host_function_runs_is_watched_in_blocks_of_its_own_only() -> None:
    log, sqrt = jax.jit(lambda x: jnp.log(x)), jax.jit(lambda x: jnp.sqrt(x))

    def host(x: Any) -> Any:
        with hcb.watch_nonfinite():
            log(-ONES)
        sqrt(-ONES)
        return x

    step = jax.jit(lambda x: hcb.call(host, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)))
    assert primitives(in_context(lambda: step(ONES).block_until_ready())) == ["log"]
    assert primitives(in_context(lambda: sqrt(-ONES))) == ["sqrt"]


@pytest.mark.parametrize("mode", ["results", "every"])
def test_operations_that_jax_evaluates_at_compile_time(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    @jax.jit
    def step(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            scale = jnp.log(jnp.full((4,), 2.0) + 1) + jnp.arange(4.0)
            wrong = jnp.sqrt(-scale)
        return x * scale * wrong

    assert primitives(in_context(lambda: step(ONES), mode=mode)) == ["sqrt"]
    assert not [line for line in caplog.messages if "could not look into" in line]
