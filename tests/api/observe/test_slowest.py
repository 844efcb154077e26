"""The slowest calls and iterations, with the places that were slow in them: below the tables, and in `hcb stats`."""

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
from hostcallback.receiver.sinks.time_rows import PROGRAM, Loop, SlowPlace, Times, slow_places
from hostcallback.receiver.sinks.times import times_by_tap
from transforming import nap

X = jnp.linspace(-0.5, 0.6, 16).reshape(4, 4)
STEPS, SLOW, LONG = 20, 13, 0.5


def step(x: Any, number: Any) -> Any:
    with hcb.span("attention"):
        x = nap(x, 0.002)
    with hcb.span("mlp"):
        return nap(x, jnp.where(number == SLOW, LONG, 0.001))


def table_below(text: str, head: str = "slowest ") -> list[str]:
    """The rows of the table of the slowest ones."""
    lines = text.splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith(head)]
    return [line for line in lines[start + 1 :] if line]


def test_stats_of_a_log_names_the_slow_step_and_the_place_that_made_it_slow(tmp_path: Path) -> None:
    @jax.jit
    def train(x: Any, number: Any) -> Any:
        x = step(x, number)
        hcb.metrics({"mean": jnp.mean(x)}, step=number)
        return x

    with hcb.outfeed_receiver(record=tmp_path / "log") as receiver:
        with hcb.observe(what="time", name="slow_parts", tap_func=lambda times: None):
            for number in range(STEPS):
                train(X, number).block_until_ready()
    slow = rf"{SLOW} +[\d.]+ m?s +[\d.]+ x  mlp [\d.]+ m?s \([\d.]+ x\)"
    summary = receiver.summary()
    assert re.match(f"step {slow}", table_below(times_by_tap["slow_parts"].text())[0])
    assert times_by_tap["slow_parts"].text() in summary
    assert {row.max_at for row in receiver.stats.times["slow_parts"] if row.place == "mlp"} == {
        f"step {SLOW}"
    }
    shown = table_below(run_hcb(tmp_path, "stats", "log").stdout)
    assert len(shown) == 5
    assert re.match(f"step {slow}", shown[0])
    assert len(table_below(run_hcb(tmp_path, "stats", "log", "--slowest", "2").stdout)) == 2
    assert "slowest " not in run_hcb(tmp_path, "stats", "log", "--slowest", "0").stdout
    wrong = run_hcb(tmp_path, "stats", "log", "--slowest", "1.5")
    assert (wrong.returncode, "got '1.5', expected a whole number up to 1,000" in wrong.stderr) == (2, True)
    found = [json.loads(line) for line in run_hcb(tmp_path, "stats", "log", "--json").stdout.splitlines()]
    first, *others = [one for one in found if "which" in one]
    assert (first["slowest"], first["which"], first["step"]) == ("slow_parts", f"step {SLOW}", SLOW)
    place = first["places"][0]
    assert (place["place"], len(others)) == ("mlp", 4)
    assert first["seconds"] >= place["seconds"] >= LONG > 10 * place["median"]


def test_the_block_prints_the_slow_step_where_the_log_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @jax.jit
    def train(x: Any, number: Any) -> Any:
        x = step(x, number - 100)
        hcb.metrics({"mean": jnp.mean(x)}, step=number)
        return x

    with hcb.outfeed_receiver(record=tmp_path), hcb.observe(what="time"):
        for number in range(100, 100 + STEPS):
            train(X, number).block_until_ready()
    shown = table_below(capsys.readouterr().out)
    assert shown[0].startswith(f"step {100 + SLOW} ")


def test_the_block_prints_the_slow_iteration_below_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    train = jax.jit(lambda x: jax.lax.scan(lambda x, n: (step(x, n), None), x, jnp.arange(STEPS))[0])
    with hcb.outfeed_receiver(), hcb.observe(what="time"):
        train(X).block_until_ready()
    shown = table_below(capsys.readouterr().out)
    assert re.match(rf"iteration {SLOW} +[\d.]+ m?s +[\d.]+ x  mlp [\d.]+ m?s \([\d.]+ x\)", shown[0])
    assert len(shown) == 5


def test_the_slow_iteration_of_a_loop_with_one_place_is_found() -> None:
    def body(state: Any) -> Any:
        number, x = state
        with hcb.span("step"):
            x = nap(x, jnp.where(number == SLOW, LONG, 0.001))
        return number + 1, x

    @jax.jit
    def scan(x: Any) -> Any:
        return jax.lax.scan(lambda x, n: (body((n, x))[1], None), x, jnp.arange(STEPS))[0]

    @jax.jit
    def wait(x: Any) -> Any:
        return jax.lax.while_loop(lambda state: state[0] < STEPS, body, (0, x))[1]

    for program, which in (scan, "iteration"), (wait, "call"):
        with hcb.outfeed_receiver(), hcb.observe(what="time", name=which, tap_func=lambda times: None):
            program(X).block_until_ready()
        first = table_below(times_by_tap[which].text())[0]
        assert re.match(rf"{which} {SLOW} .* step [\d.]+ m?s \(", first)


def one(*seconds: float) -> dict[str, Any]:
    return {"cpu:0": np.array(seconds if len(seconds) > 1 else seconds[0], np.float32)}


def test_few_calls_have_no_list_but_where_it_is_asked_for() -> None:
    times = Times()
    for number in range(9):
        times.add({"a": one(1), PROGRAM: one(2 + number)})
    assert times.slowest() == []
    assert [each.which for each in times.slowest(has_few=True)] == [f"call {n}" for n in (8, 7, 6, 5, 4)]
    times.add({"a": one(1), PROGRAM: one(1)})
    assert times.slowest()[0].which == "call 8"
    assert times.text().splitlines()[-1].startswith("call 4 ")


def test_calls_are_listed_unless_there_are_few_with_more_iterations() -> None:
    def loop(*seconds: float) -> Loop:
        return Loop(1, {"a", "b"}, one(*seconds), has_several=True)

    times = Times()
    for number in range(FEW := 32):
        added = {"a": one(1, 1), "b": one(1, number), PROGRAM: one(9)}
        times.add(added, loops=[loop(2, 1 + number)])
    assert [each.which for each in times.slowest()[:2]] == ["call 31, iteration 1", "call 30, iteration 1"]
    assert times.slowest()[0].places == [SlowPlace("b", 31.0, pytest.approx(1, rel=0.01))]
    times.add({"a": one(1, 1), "b": one(1, 40), PROGRAM: one(50)}, step=FEW, loops=[loop(2, 41)])
    first = times.slowest()[0]
    assert (first.which, first.step, first.seconds, first.median) == (
        "step 32",
        32,
        50,
        pytest.approx(9, rel=0.01),
    )
    assert first.places[0][:2] == ("b", 41.0)  # both iterations


def test_devices_with_a_message_each_of_one_call_are_one_step() -> None:
    times = Times()
    for number in range(12):
        for device, slow in ("cpu:0", 1), ("cpu:1", 2):
            times.add({PROGRAM: {device: np.float32(number * slow + 1)[np.newaxis]}}, step=number)
    assert [(each.step, each.seconds) for each in times.slowest()] == [
        (n, 2 * n + 1) for n in (11, 10, 9, 8, 7)
    ]


def test_devices_that_run_calls_of_their_own_have_a_step_each() -> None:
    times = Times()
    for number in range(12):
        for device, step in ("cpu:0", 2 * number), ("cpu:1", 2 * number + 1):
            times.add({PROGRAM: {device: np.float32(step + 1)[np.newaxis]}}, step=step)
    assert [(each.step, each.seconds) for each in times.slowest()] == [(n, n + 1) for n in range(23, 18, -1)]


def test_places_are_slow_against_their_own_median() -> None:
    medians = {"a": 1.0, "b": 0.1, "c": 5.0, "d": 0.001, "evaluate": 0.0}
    seconds = {"a": 1.1, "b": 0.5, "c": 7.0, "d": 0.004, "evaluate": 0.9}
    found = slow_places(seconds, medians, 6.0)
    assert [each.place for each in found] == ["c", "evaluate", "b"]  # "a" is 1.1 x, and "d" is nothing of 6 s
    assert [*map(str, found)] == ["c 7 s (1.4 x)", "evaluate 900 ms (seldom runs)", "b 500 ms (5 x)"]


def test_the_place_in_which_the_time_is_stands_for_those_around_it() -> None:
    medians = {"step": 2.0, "step/cheap": 1.0, "step/solve": 1.0, "other": 1.0}
    seconds = {"step": 9.0, "step/cheap": 1.5, "step/solve": 7.5, "other": 2.0}
    assert [one.place for one in slow_places(seconds, medians, 3.0)] == ["step/solve", "other", "step/cheap"]
    seconds |= {"step/solve": 2.0}  # the time is in the step, and not in a place of it
    assert slow_places(seconds, medians, 3.0)[0].place == "step"


@pytest.mark.parametrize(("inside", "told"), [(0.75, ["step", "step/solve"]), (1.0, ["step/solve"])])
def test_half_of_the_time_more_is_enough_to_explain_the_place_around(inside: float, told: list[str]) -> None:
    found = slow_places({"step": 3.0, "step/solve": 1.0 + inside}, {"step": 1.0, "step/solve": 1.0}, 1.0)
    assert [one.place for one in found] == told


def test_a_place_that_seldom_runs_has_no_median() -> None:
    times = Times()
    for number in range(20):
        times.add({"evaluate": one(1 if number == 7 else np.nan), PROGRAM: one(2 if number == 7 else 1)})
    first = times.slowest()[0]
    assert (first.which, first.places) == ("call 7", [SlowPlace("evaluate", 1.0, 0.0)])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_place_that_runs_once_in_some_calls_and_in_a_loop_in_others_has_the_median_of_all(
    devices: int,
) -> None:
    times = Times()
    for number in range(60):
        seconds = np.full(4, 0.5) if number % 3 == 1 else np.array([5.0 if number == 12 else 1.0])
        of_devices = {f"cpu:{n}": seconds for n in range(devices)}
        whole = {device: each.sum(keepdims=True) for device, each in of_devices.items()}
        times.add({"solve": of_devices, PROGRAM: whole})
    (place,) = times.slowest()[0].places
    assert (place.place, place.seconds) == ("solve", 5.0)
    assert place.median == pytest.approx(1, rel=0.01)
