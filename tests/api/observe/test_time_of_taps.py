"""Times of what only a tap, a check or another effect uses: it is part of its place and of the program."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec as P

import hostcallback as hcb
from hostcallback.api.observe.observe import NOT_COMPUTED
from hostcallback.api.observe.spans import MAX_ENTERED, SPANS

X = jnp.linspace(-0.5, 0.6, 16).reshape(4, 4)
NAP = 0.03  # seconds


def _sleep(x: Any) -> Any:
    end = time.perf_counter() + NAP
    while time.perf_counter() < end:
        pass
    return np.asarray(x)


def nap(x: Any) -> Any:
    """Returns `x` after some time, in the program."""
    return jax.pure_callback(_sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


def times_of(function: Callable[..., Any], *args: Any, calls: int = 1) -> tuple[Any, dict[str, Any]]:
    """The results of the jitted function, and the shortest times of its places."""
    messages: list[dict[str, Any]] = []
    program = jax.jit(function)
    with hcb.outfeed_receiver(), hcb.observe(what="time", tap_func=messages.append):
        for _ in range(calls):
            out = jax.block_until_ready(program(*args))
    assert len(messages) == calls
    return out, {place: np.min([each[place]["seconds"] for each in messages], 0) for place in messages[0]}


seen: list[Any] = []


def _print(value: Any) -> None:
    hcb.print("{}", value)


def _check(value: Any) -> None:
    hcb.check(value < 100, "large")


def _metrics(value: Any) -> None:
    hcb.metrics({"value": value})


def _tap(value: Any) -> None:
    hcb.id_tap(lambda value: seen.append(float(value)), value)


def _debug_print(value: Any) -> None:
    jax.debug.print("{}", value)


def _io_callback(value: Any) -> None:
    io_callback(lambda value: seen.append(float(value)), None, value)


def _in_jit(value: Any) -> None:
    jax.jit(lambda value: _print(nap(value) + 1))(value)


def _in_branch(value: Any) -> None:
    jax.lax.cond(value < 100, lambda: _print(nap(value) + 1), lambda: None)


def _in_loop(value: Any) -> None:
    jax.lax.scan(lambda carry, x: (carry, _print(nap(x))), None, jnp.stack([value, value]))


def _in_loop_of_one(value: Any) -> None:
    jax.lax.scan(lambda carry, x: (carry, _print(nap(x) + carry)), value, jnp.stack([value]))


def _in_checkpoint(value: Any) -> None:
    jax.checkpoint(lambda value: _print(nap(value) + 1))(value)


def _in_shard_map(value: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    jax.shard_map(lambda value: _print(nap(value) + 1), mesh=mesh, in_specs=P(), out_specs=P())(value)


ENDS = [_print, _check, _metrics, _tap, _debug_print, _io_callback]
AROUND = [_in_jit, _in_branch, _in_loop, _in_loop_of_one, _in_checkpoint, _in_shard_map]


def lead_to(end: Callable[[Any], None], x: Any) -> Any:
    """Two places; the result of the second one goes to a tap alone."""
    with hcb.span("train"):
        y = jnp.tanh(x @ x)
    with hcb.span("eval"):
        total = jnp.sum(y)
        end(total if end in AROUND else nap(total))
    return y


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("end", [*ENDS, *AROUND])
def test_work_for_a_tap_is_in_its_place_and_in_the_program(end: Callable[[Any], None]) -> None:
    seen.clear()
    out, seconds = times_of(lambda x: lead_to(end, x), X)
    assert list(seconds) == ["train", "eval", "program"]
    assert NAP <= seconds["eval"] <= seconds["program"]
    assert seconds["train"] + seconds["eval"] <= seconds["program"] + 1e-5
    np.testing.assert_array_equal(out, jax.jit(lambda x: jnp.tanh(x @ x))(X))
    if end in (_tap, _io_callback):
        hcb.barrier_wait()
        jax.effects_barrier()
        np.testing.assert_allclose(seen, [float(jnp.sum(out))], rtol=1e-6)


@pytest.mark.parametrize("end", [_print, _check, _in_jit, _in_branch, _in_loop])
def test_work_for_a_tap_is_in_its_iteration(end: Callable[[Any], None]) -> None:
    def program(x: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            with hcb.span("step"):
                y = jnp.tanh(x @ x)
                jax.lax.cond(i == 2, lambda: end(nap(jnp.sum(y))), lambda: None)
            return y, None

        return jax.lax.scan(body, x, jnp.arange(4))[0]

    out, seconds = times_of(program, X, calls=2)
    assert np.argmax(seconds["step"]) == 2
    assert NAP <= seconds["step"][2] <= seconds["program"]
    np.testing.assert_array_equal(out, jax.jit(program)(X))


def test_a_slow_step_of_a_scan_is_found_where_each_step_sends_metrics() -> None:
    def program(x: Any) -> Any:
        def body(x: Any, i: Any) -> Any:
            with hcb.span("step"):
                y = jnp.tanh(x @ x)
                slow = jax.lax.cond(i == 5, nap, lambda value: value, jnp.sum(y))
                hcb.metrics({"slow": slow}, step=i)
            return y, None

        return jax.lax.scan(body, x, jnp.arange(10))[0]

    _, seconds = times_of(program, X, calls=2)
    assert np.argmax(seconds["step"]) == 5
    assert NAP <= np.sum(seconds["step"]) <= seconds["program"]


def test_work_for_a_tap_outside_of_places_is_in_the_program_only() -> None:
    def program(x: Any) -> Any:
        hcb.print("{}", nap(jnp.sum(x)))
        with hcb.span("part"):
            y = jnp.tanh(x @ x)
        hcb.print("{}", nap(jnp.sum(y)))
        with hcb.span("next"):
            return y @ x

    out, seconds = times_of(program, X, calls=4)
    assert seconds["part"] < NAP
    assert seconds["next"] < NAP
    assert seconds["program"] >= 2 * NAP
    np.testing.assert_array_equal(out, jax.jit(program)(X))


def test_work_for_a_tap_is_in_the_inner_and_the_outer_place() -> None:
    def program(x: Any) -> Any:
        with hcb.span("outer"):
            y = jnp.tanh(x @ x)
            with hcb.span("inner"):
                hcb.print("{}", nap(jnp.sum(y)))
            hcb.print("{}", nap(jnp.max(y)))
        return y

    _, seconds = times_of(program, X)
    assert list(seconds) == ["outer", "outer/inner", "program"]
    assert NAP <= seconds["outer/inner"] <= seconds["outer"]
    assert 2 * NAP <= seconds["outer"] <= seconds["program"]


def test_a_host_function_whose_result_nothing_uses_is_in_its_place() -> None:
    def program(x: Any) -> Any:
        with hcb.span("host"):
            hcb.call(_sleep, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
        return jnp.sin(x)

    _, seconds = times_of(program, X)
    assert NAP <= seconds["host"] <= seconds["program"]


def test_gradients_of_a_program_that_sends_its_loss_stay_the_same() -> None:
    def loss(x: Any) -> Any:
        with hcb.span("layer"):
            y = jnp.tanh(x @ x)
        with hcb.span("report"):
            hcb.metrics({"norm": nap(jnp.linalg.norm(jax.lax.stop_gradient(y)))})
        return jnp.sum(y**2)

    program = jax.grad(loss)
    out, seconds = times_of(program, X)
    assert NAP <= seconds["report"] <= seconds["program"]
    assert "backward layer" in seconds
    np.testing.assert_allclose(out, jax.jit(program)(X), rtol=2e-6)


def test_work_for_a_tap_on_each_device_is_in_its_place() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    def body(x: Any) -> Any:
        with hcb.span("work"):
            hcb.print("{}", nap(jnp.sum(x)))
        return x + jax.lax.psum(x, "d")

    program = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    out, seconds = times_of(program, X)
    assert {found.shape for found in seconds.values()} == {(2,)}
    assert np.all(seconds["work"] >= NAP)
    assert np.all(seconds["program"] >= seconds["work"])
    np.testing.assert_array_equal(out, jax.jit(program)(X))


def test_a_place_without_a_time_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: Any) -> Any:
        with hcb.span("draw"):
            key = jax.random.key(1)
        with hcb.span("unused"):
            _ = jnp.cos(x) @ x
        with hcb.span("empty"):
            pass
        with hcb.span("outer"), hcb.span("part"):
            return key, jnp.sin(x)

    step, messages = jax.jit(program), []
    with caplog.at_level(logging.WARNING), hcb.outfeed_receiver():
        with hcb.observe(what="time", name="parts", tap_func=messages.append):
            for _ in range(2):
                with hcb.span("around"):
                    step(X)
            jax.jit(jax.grad(lambda x: jnp.sum(program(x)[1])))(X)
    assert [list(values) for values in messages[:2]] == [["outer", "outer/part", "program"]] * 2
    said = [text for text in caplog.messages if "has no time of" in text]
    places = [re.findall(r"'(\w+)', at .*?test_time_of_taps\.py:\d+", text) for text in said]
    assert list(map(sorted, places)) == [["draw"], ["around", "empty", "unused"]]
    assert said[0].startswith("parts has no time of 'draw', at ")
    assert said[1].startswith("parts has no time of 3 places: 'around', at ")
    assert all(text.endswith(": " + NOT_COMPUTED) for text in said)


def test_many_spans_without_a_time_are_one_warning_and_few_notes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(x: Any) -> Any:
        with hcb.span("part"):
            return jnp.sin(x)

    count = MAX_ENTERED + 10
    block = hcb.observe(what="time", name="many", tap_func=lambda times: None)
    with caplog.at_level(logging.WARNING), hcb.outfeed_receiver(), block:
        jax.jit(program)(X)
        for i in range(count):
            with hcb.span(f"s{i}"):
                pass
        assert len(block.notes[SPANS].lines) == MAX_ENTERED
    [said] = [text for text in caplog.messages if "has no time of" in text]
    assert said.startswith(f"many has no time of {MAX_ENTERED - 1:,} or more places: 's0', at {__file__}:")
    assert "'s4', at" in said
    assert "'s5'" not in said
    assert "; and others: no array of numbers" in said


@pytest.mark.parametrize(
    "block", [lambda: hcb.observe(where="part", tap_func=print), hcb.watch_nonfinite], ids=["where", "watch"]
)
def test_spans_are_noted_only_where_all_are_measured(block: Any) -> None:
    with hcb.outfeed_receiver(), block() as context:
        with hcb.span("part"):
            jax.jit(jax.named_scope("part")(jnp.sin))(X)
        assert SPANS not in context.notes


def test_a_span_in_the_condition_of_a_while_loop_has_no_time_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(x: Any, name: str) -> Any:
        def goes_on(x: Any) -> Any:
            with hcb.span("test"):
                return jnp.sum(x) < 100

        def body(x: Any) -> Any:
            with hcb.span(name) if name else contextlib.nullcontext():
                return x + 1

        return jax.lax.while_loop(goes_on, body, x)

    options: dict[str, Any] = {"what": "time", "name": "loop", "tap_func": lambda times: None}
    with caplog.at_level(logging.WARNING), hcb.outfeed_receiver():
        with hcb.observe(**options):
            jax.jit(functools.partial(program, name="step"))(X)
        with pytest.raises(ValueError, match=r"of 1 program is in the condition of a while_loop, and places"):
            with hcb.observe(**options | {"name": "none"}):
                jax.jit(functools.partial(program, name=""))(X)
    [said] = [text for text in caplog.messages if "has no time of" in text]
    assert re.fullmatch(
        r"loop has no time of 'test', at .*: places in the condition of a while_loop have no time", said
    )
