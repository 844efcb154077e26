"""What the page shows of the times of places: shares, distributions and the slowest calls, from real logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcallback as hcb

Serve = Callable[..., Any]
STEPS, SLOW, NAP = 40, 23, 0.05


def nap(x: Any, seconds: Any) -> Any:
    """Returns `x` after some time, in the program."""

    def sleep(x: Any, seconds: Any) -> Any:
        end = time.perf_counter() + float(seconds)
        while time.perf_counter() < end:
            pass
        return np.asarray(x)

    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x, seconds)


def step(x: Any, number: Any) -> Any:
    """Two places, of which one has another one in it; one step is slow."""
    hcb.metrics({"loss": jnp.sum(x)}, step=number)
    with hcb.span("attention"):
        x = nap(x, 0.002)
        with hcb.span("softmax"):
            x = nap(x, 0.001)
    with hcb.span("mlp"):
        return nap(x, jnp.where(number == SLOW, NAP, 0.001))


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a training of which each step is a call."""
    folder = tmp_path_factory.mktemp("calls") / "taps"
    train = jax.jit(step)
    with hcb.outfeed_receiver(record=folder), hcb.observe(what="time", name="parts"):
        for number in range(STEPS):
            train(jnp.ones(4), number).block_until_ready()
    return folder


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a training in one call."""
    folder = tmp_path_factory.mktemp("loop") / "taps"
    train = jax.jit(lambda x: jax.lax.scan(lambda x, n: (step(x, n), None), x, jnp.arange(STEPS))[0])
    with hcb.outfeed_receiver(record=folder), hcb.observe(what="time", name="parts"):
        train(jnp.ones(4)).block_until_ready()
    return folder


def times(client: Any, **query: Any) -> Any:
    """The server's answer."""
    return client.get("/api/times", params=query).raise_for_status().json()


def test_the_shares_of_places_are_stacked_over_the_steps(calls: Path, serve: Serve) -> None:
    found = times(serve(calls))
    [[number, _, name]] = found["taps"]
    assert (found["tap"], name) == (number, "parts")
    assert (found["axis"], found["x"]) == ("step", [*range(STEPS)])
    assert found["stacked"] == ["attention", "mlp"]  # softmax is in attention, and counts once
    for whole, attention, mlp in zip(found["whole"], *found["seconds"], strict=True):
        assert 0.003 <= attention < attention + mlp <= whole
    assert found["seconds"][1][SLOW] >= NAP


def test_a_table_has_the_distributions_of_places(calls: Path, serve: Serve) -> None:
    found = times(serve(calls))
    rows = {row["place"]: row for row in found["places"]}
    assert [*rows] == ["attention", "mlp", "attention/softmax", "program"]
    assert {row["count"] for row in rows.values()} == {STEPS} == {sum(row["counts"]) for row in rows.values()}
    mlp = rows["mlp"]
    assert 0.001 <= mlp["p50"] <= mlp["p90"] <= mlp["p99"]
    assert mlp["p99"] >= 0.99 * NAP
    low, high = found["range"]
    assert low <= rows["attention/softmax"]["p50"] <= rows["program"]["p99"] <= high
    assert rows["attention"]["share"] + mlp["share"] <= 1 == rows["program"]["share"]


def test_the_slowest_step_comes_first_with_the_place_that_took_longer(calls: Path, serve: Serve) -> None:
    slowest = times(serve(calls))["slowest"]
    first = slowest[0]
    assert (first["step"], first["x"], len(slowest)) == (SLOW, None, 10)
    assert first["seconds"] >= sum(first["parts"]) >= first["parts"][1] >= NAP
    assert [one["seconds"] for one in slowest] == sorted((one["seconds"] for one in slowest), reverse=True)


def test_a_log_of_one_call_is_shown_by_iteration(loop: Path, serve: Serve) -> None:
    found = times(serve(loop))
    assert (found["axis"], found["x"], found["stacked"]) == (
        "iteration",
        [*range(STEPS)],
        ["attention", "mlp"],
    )
    assert found["whole"] == pytest.approx([sum(parts) for parts in zip(*found["seconds"], strict=True)])
    assert found["slowest"][0]["x"] == SLOW
    assert found["slowest"][0]["parts"][1] >= NAP


def test_a_log_without_times_has_none(log: Path, serve: Serve) -> None:
    assert times(serve(log)) == {"taps": []}


def test_each_run_has_its_own_times_and_the_last_one_is_shown(calls: Path, loop: Path, serve: Serve) -> None:
    client = serve(calls, loop)
    first, last = times(client)["taps"]
    assert times(client)["tap"] == last[0]
    assert times(client, tap=first[0])["axis"] == "step"
    assert {tap["kind"] for tap in client.get("/api/overview").json()["taps"]} >= {"time", "text", "scalar"}


@pytest.mark.native_only  # in callbacks of several devices, steps are not known of all messages
def test_devices_and_iterations_of_a_while_loop_belong_to_their_call(tmp_path: Path, serve: Serve) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def body(x: Any, number: Any) -> Any:
        def around(state: Any) -> Any:
            with hcb.span("around"):
                return state[0] + 1, jnp.sin(state[1] @ state[1])

        hcb.metrics({"loss": jax.lax.pmean(jnp.sum(x), "d")}, step=number)
        late = jax.lax.axis_index("d") == 1
        with hcb.span("work"):
            x = jax.lax.cond(late, lambda x: nap(x, NAP) + 0 * x, lambda x: x, x)
        return jax.lax.while_loop(lambda state: state[0] < 3, around, (0, x))[1]

    spec = jax.sharding.PartitionSpec(None, "d")
    program = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec, check_vma=False
        )
    )
    with hcb.outfeed_receiver(record=tmp_path), hcb.observe(what="time"):
        for number in range(20):
            program(jnp.eye(4, 8), number).block_until_ready()
    found = times(serve(tmp_path))
    rows = {row["place"]: row for row in found["places"]}
    assert (rows["around"]["count"], rows["work"]["count"]) == (20 * 3 * 2, 20 * 2)
    assert (rows["work"]["slowest"], rows["work"]["spread"]) == ("[1]", pytest.approx(1, rel=0.2))
    assert (found["axis"], found["x"], sorted(found["stacked"])) == ("step", [*range(20)], ["around", "work"])
    assert all(all(part) for part in found["seconds"])
    assert all(whole >= NAP / 2 for whole in found["whole"])  # the mean of both devices
