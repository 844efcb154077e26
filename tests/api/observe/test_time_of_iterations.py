"""The row `iteration`: the time of all places of an iteration together, in the table of a program and of its log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb
from hcb_command import hcb as run_hcb
from hostcallback.receiver.sinks.time_rows import TimeRow
from transforming import nap

X = jnp.linspace(-0.5, 0.6, 16).reshape(4, 4)
NAP = 0.05


def rows_of(function: Any, *args: Any, calls: int = 1, **options: Any) -> dict[str, TimeRow]:
    """The rows of the jitted function, by place, in the order of the table."""
    program = jax.jit(function)
    with hcb.outfeed_receiver(**options) as receiver:
        with hcb.observe(what="time", name=function.__name__, tap_func=lambda times: None):
            for _ in range(calls):
                program(*args)
    return {row.place: row for row in receiver.stats.times[function.__name__]}


@pytest.mark.slow
def test_the_slowest_iteration_is_not_that_of_one_of_its_places(tmp_path: Path) -> None:
    def two_places(x: Any) -> Any:
        def body(x: Any, lengths: Any) -> Any:
            with hcb.span("first"):
                x = nap(x, lengths[0])
            with hcb.span("second"):
                return nap(x, lengths[1]), None

        naps = jnp.array([[1, 1], [10, 1], [8, 8], [1, 10], [1, 1]]) * NAP
        return jax.lax.scan(body, x, naps)[0]

    rows = rows_of(two_places, X, record=tmp_path / "log")
    assert [*rows] == ["first", "second", "iteration", "program"]
    assert rows["first"].max_at == "iteration 1"
    assert rows["second"].max_at == "iteration 3"
    whole = rows["iteration"]
    assert (whole.count, whole.max_at) == (5, "iteration 2")
    assert 2 * NAP <= whole.p50 <= whole.p90 <= whole.p99 <= whole.max
    assert 16 * NAP <= whole.max <= rows["program"].max
    assert whole.mean == pytest.approx(rows["first"].mean + rows["second"].mean)
    assert whole.share == pytest.approx(rows["first"].share + rows["second"].share)
    found = [json.loads(line) for line in run_hcb(tmp_path, "stats", "log", "--json").stdout.splitlines()]
    [logged] = [one for one in found if one.get("place") == "iteration"]
    assert (logged["count"], logged["max_at"], logged["max"]) == (5, "iteration 2", whole.max)
    assert re.search("iteration +5 .*, iteration 2 ", run_hcb(tmp_path, "stats", "log").stdout)


def test_a_step_and_its_backward_pass_are_added() -> None:
    def training(w: Any) -> Any:
        def body(w: Any, _: Any) -> Any:
            with hcb.span("step"):
                loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(w)
            return w - 0.1 * gradient, loss

        return jax.lax.scan(body, w, None, length=20)

    rows = rows_of(training, X, calls=3)
    assert [*rows] == ["step", "backward step", "iteration", "program"]
    assert rows["iteration"].count == 60
    assert rows["iteration"].mean == pytest.approx(rows["step"].mean + rows["backward step"].mean)
    assert re.fullmatch(r"call [012], iteration \d+", rows["iteration"].max_at)


def test_places_in_a_place_add_no_row() -> None:
    def nested(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            with hcb.span("outer"):
                x = jnp.sin(x @ x)
                for name in ("first", "second"):
                    with hcb.span(name):
                        x = jnp.cos(x @ x)
                return x @ x, None

        return jax.lax.scan(body, x, None, length=4)[0]

    assert [*rows_of(nested, X, calls=2)] == ["outer", "outer/first", "outer/second", "program"]


def test_loops_of_one_length_have_rows_of_their_own() -> None:
    def two_loops(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            for name in ("first", "second"):
                with hcb.span(name):
                    x = jnp.sin(x @ x)
            return x, None

        def lonely(x: Any, _: Any) -> Any:
            with hcb.span("lonely"):
                return nap(x, NAP), None

        x = jax.lax.scan(lonely, x, None, length=4)[0]
        x = jax.lax.scan(body, x, None, length=4)[0]
        return jax.lax.scan(body, x, None, length=4, reverse=True)[0]

    rows = rows_of(two_loops, X)
    places = ["lonely", "first", "second", "first#2", "second#2"]
    assert [*rows] == [*places, "iteration", "iteration#2", "program"]
    for name, end in (("iteration", ""), ("iteration#2", "#2")):
        assert rows[name].mean == pytest.approx(rows[f"first{end}"].mean + rows[f"second{end}"].mean)


def test_the_iterations_of_an_outer_loop_have_what_the_inner_one_took() -> None:
    def layered(x: Any) -> Any:
        def layer(x: Any, number: Any) -> Any:
            with hcb.span("layer"):
                return nap(x, number * NAP), None

        def body(x: Any, number: Any) -> Any:
            with hcb.span("embed"):
                x = jnp.sin(x @ x)
            return jax.lax.scan(layer, x, number * jnp.arange(3))[0], None

        return jax.lax.scan(body, x, jnp.arange(3) % 2)[0]

    rows = rows_of(layered, X)
    assert [*rows] == ["embed", "layer", "iteration", "program"]
    assert (rows["layer"].count, rows["layer"].max_at) == (9, "iteration 1/2")
    assert (rows["iteration"].count, rows["iteration"].max_at) == (3, "iteration 1")
    assert rows["iteration"].max >= 3 * NAP


def test_epochs_of_steps_have_the_row_of_the_steps() -> None:
    def epochs(x: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            for name in ("first", "second"):
                with hcb.span(name):
                    x = jnp.sin(x @ x)
            return x, None

        def epoch(x: Any, _: Any) -> Any:
            return jax.lax.scan(step, x, None, length=5)[0], None

        return jax.lax.scan(epoch, x, None, length=3)[0]

    rows = rows_of(epochs, X)
    assert [*rows] == ["first", "second", "iteration", "program"]
    assert rows["iteration"].count == 15
    assert re.fullmatch(r"iteration [012]/[01234]", rows["iteration"].max_at)


def test_each_iteration_of_a_while_loop_counts_also_where_a_place_does_not_run() -> None:
    def waiting(x: Any) -> Any:
        def body(state: Any) -> Any:
            number, x = state
            with hcb.span("train"):
                x = nap(x, NAP)
            with hcb.span("evaluate"):
                x = jax.lax.cond(number == 2, lambda x: nap(x, 10 * NAP), lambda x: x, x)
            return number + 1, x

        def branch(state: Any) -> Any:
            with hcb.span("branch"):
                return state[0], jnp.sin(state[1] @ state[1])

        def both(state: Any) -> Any:
            return body(jax.lax.cond(state[0] == 1, branch, lambda state: state, state))

        return jax.lax.while_loop(lambda state: state[0] < 4, both, (0, x))[1]

    rows = rows_of(waiting, X)
    assert set(rows) == {"train", "evaluate", "branch", "iteration", "program"}
    whole = rows["iteration"]
    assert (rows["branch"].count, whole.count, whole.max_at) == (1, 4, "call 2")
    assert whole.max >= 11 * NAP > 10 * NAP > whole.p50 >= NAP


def test_each_device_has_its_iterations() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def divided(x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            late = jax.lax.axis_index("d") == 1
            for name in ("first", "second"):
                with hcb.span(name):
                    x = jax.lax.cond(late, lambda x: nap(x, NAP) + 0 * x, lambda x: x, x)
            return x, None

        def both(x: Any) -> Any:
            return jax.lax.scan(body, x, None, length=3)[0]

        spec = jax.sharding.PartitionSpec("d")
        return jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    rows = rows_of(divided, X)
    whole = rows["iteration"]
    assert (whole.count, whole.slowest) == (6, "[1]")
    assert whole.max >= 2 * NAP
    assert whole.mean == pytest.approx(rows["first"].mean + rows["second"].mean)


@pytest.mark.parametrize("where", ["scan carry", ["layer", "scan carry"]])
def test_the_carry_of_a_loop_has_no_time(where: Any) -> None:
    wanted = r"where='scan carry' selects values.*put hcb\.span\('step'\) around the body of.*test_time_of_it.*\.py"
    with pytest.raises(ValueError, match=wanted):
        hcb.observe(where=where, what="time")
