"""What the page shows of the times of places: shares, distributions and the slowest calls, from real logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hcb_command
import hostcallback as hcb
from hostcallback.receiver.sinks.times import DEVICE, SECONDS, START
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from hostcallback.receiver.ui.index.log_index import LogIndex
from logged_frames import LOSS, NORM, block_of, frame
from transforming import nap

Serve = Callable[..., Any]
STEPS, SLOW, LONG, NAP = 40, 23, 0.5, 0.05


def step(x: Any, number: Any) -> Any:
    """Two places, of which one has another one in it; one step is slow."""
    hcb.metrics({"loss": jnp.sum(x)}, step=number)
    with hcb.span("attention"):
        x = nap(x, 0.002)
        with hcb.span("softmax"):
            x = nap(x, 0.001)
    with hcb.span("mlp"):
        return nap(x, jnp.where(number == SLOW, LONG, 0.001))


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
    assert found["seconds"][1][SLOW] >= LONG


def test_a_table_has_the_distributions_of_places(calls: Path, serve: Serve) -> None:
    found = times(serve(calls))
    rows = {row["place"]: row for row in found["places"]}
    assert [*rows] == ["attention", "mlp", "attention/softmax", "program"]
    assert {row["count"] for row in rows.values()} == {STEPS} == {sum(row["counts"]) for row in rows.values()}
    mlp = rows["mlp"]
    assert 0.001 <= mlp["p50"] <= mlp["p90"] <= mlp["p99"]
    assert mlp["p99"] >= 0.99 * LONG
    low, high = found["range"]
    assert low <= rows["attention/softmax"]["p50"] <= rows["program"]["p99"] <= high
    assert rows["attention"]["share"] + mlp["share"] <= 1 == rows["program"]["share"]


def test_the_slowest_step_comes_first_with_the_place_that_took_longer(calls: Path, serve: Serve) -> None:
    found = times(serve(calls))
    first, slowest = found["slowest"][0], found["slowest"]
    assert (first["step"], first["x"], len(slowest)) == (SLOW, None, 10)
    place, seconds, median = first["longer"][0]
    assert (place, first["seconds"] >= seconds >= LONG > 10 * median) == ("mlp", True)
    assert found["usual"] < LONG < first["seconds"]
    assert [one["seconds"] for one in slowest] == sorted((one["seconds"] for one in slowest), reverse=True)


@pytest.mark.parametrize("recorded", ["calls", "loop"])
def test_medians_are_those_of_hcb_stats(recorded: str, request: pytest.FixtureRequest, serve: Serve) -> None:
    folder = request.getfixturevalue(recorded)
    found = times(serve(folder))
    told = hcb_command.hcb(folder, "stats", ".", "--slowest", "10", "--json").stdout
    steps = [row for row in map(json.loads, told.splitlines()) if "which" in row]
    assert [round(row["median"], 12) for row in steps] == [round(found["usual"], 12)] * 10
    assert [row["seconds"] for row in steps] == pytest.approx([row["seconds"] for row in found["slowest"]])
    for step, row in zip(steps, found["slowest"], strict=True):
        medians = {place["place"]: place["median"] for place in step["places"]}
        assert medians == {place: pytest.approx(median) for place, _, median in row["longer"]}


def test_a_log_of_one_call_is_shown_by_iteration(loop: Path, serve: Serve) -> None:
    found = times(serve(loop))
    assert (found["axis"], found["x"], found["stacked"]) == (
        "iteration",
        [*range(STEPS)],
        ["attention", "mlp"],
    )
    assert found["whole"] == pytest.approx([sum(parts) for parts in zip(*found["seconds"], strict=True)])
    assert found["slowest"][0]["x"] == SLOW
    place, seconds, _ = found["slowest"][0]["longer"][0]
    assert (place, seconds >= LONG) == ("mlp", True)


def test_the_slowest_iteration_names_the_place_inside_the_one_around_the_body(
    tmp_path: Path, serve: Serve
) -> None:
    def body(x: Any, number: Any) -> tuple[Any, None]:
        with hcb.span("step"):
            with hcb.span("cheap"):
                x = nap(x, 0.001)
            with hcb.span("solve"):
                return nap(x, jnp.where(number == SLOW, LONG, 0.001)), None

    with hcb.outfeed_receiver(record=tmp_path / "taps"), hcb.observe(what="time", name="parts"):
        jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(STEPS))[0])(jnp.ones(4)).block_until_ready()
    found = times(serve(tmp_path / "taps"))
    assert (found["axis"], found["stacked"]) == ("iteration", ["step"])
    [slowest] = [call for call in found["slowest"] if call["x"] == SLOW]
    assert slowest["longer"][0][0] == "step/solve"
    assert all(place != "step" for place, *_ in slowest["longer"])


def test_a_log_without_times_has_none(log: Path, serve: Serve) -> None:
    assert times(serve(log)) == {"taps": []}


@pytest.mark.native_only  # callbacks tell of no launch: the step of too many messages may be unknown
def test_each_run_has_its_own_times_and_the_last_one_is_shown(calls: Path, loop: Path, serve: Serve) -> None:
    client = serve(calls, loop)
    first, last = times(client)["taps"]
    assert times(client)["tap"] == last[0]
    assert times(client, tap=first[0])["axis"] == "step"
    assert {tap["kind"] for tap in client.get("/api/overview").json()["taps"]} >= {"time", "text", "scalar"}


@pytest.mark.slow
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
    # The mean of both devices; the nap is measured by another clock than its place.
    assert all(whole >= 0.99 * NAP / 2 for whole in found["whole"])


@pytest.mark.native_only  # callbacks of several devices do not tell which belong to one launch
def test_iterations_of_several_devices_are_those_of_their_call(tmp_path: Path, serve: Serve) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))

    def body(x: Any, _: Any) -> Any:
        with hcb.span("work"):
            return jnp.sin(x), None

    program = jax.jit(lambda x: jax.lax.scan(body, x, length=10)[0])
    x = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    with hcb.outfeed_receiver(record=tmp_path), hcb.observe(what="time", tap_func=lambda found: None):
        program(x).block_until_ready()
    found = times(serve(tmp_path))
    assert (found["axis"], found["x"]) == ("iteration", [*range(10)])
    assert sorted(row["x"] for row in found["slowest"]) == [*range(10)]


TREE = ["dict", [["value", "a"]], [["dict", [["value", SECONDS], ["value", START]], [["array"], ["array"]]]]]
TIMED = replace(
    LOSS,
    name="t",
    consumer_id=99,
    kind="time",
    params={"axes": {"a": [DEVICE]}},
    kwargs={},
    transforms=(),
    tree=TREE,
)


@pytest.mark.parametrize(
    "seconds",
    [np.zeros((0, 1)), np.zeros((300_000, 0)), np.full((2, 1), np.inf), np.full((2, 1), -1.0)],
    ids=["no device", "no segment", "infinite", "negative"],
)
def test_times_that_no_clock_measures_are_left_out(tmp_path: Path, serve: Serve, seconds: Any) -> None:
    logs = [LogWriter(tmp_path / f"p{number}", LogOptions(run="one")) for number in range(4)]
    starts = np.zeros((*seconds.shape, 2), np.uint32)
    for number, log in enumerate(logs):
        log.describe(LOSS)
        log.describe(TIMED)
        frames = [frame(LOSS, np.float32(number), np.int32(0), seq=0)]
        if number == 0:
            frames.append(frame(TIMED, seconds.astype(np.float32), starts, seq=1))
        log.append("cpu:0", block_of(*frames), at_once=True)
        log.close()
    client = serve(tmp_path)
    found = times(client)
    counts = {tap["name"]: tap["count"] for tap in client.get("/api/overview").json()["taps"]}
    assert counts["loss"] == 4
    assert all(row["count"] == 0 and row["mean"] is None for row in found.get("places", []))


def test_a_chunk_that_cannot_be_read_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [LogWriter(tmp_path / f"p{number}", LogOptions(run="one")) for number in range(4)]
    for number, log in enumerate(logs):
        for described in (LOSS, NORM):
            log.describe(described)
        tap = NORM if number == 1 else LOSS
        log.append(
            "cpu:0",
            block_of(frame(tap, np.float32(number), *[np.int32(0)] * (tap is LOSS), seq=0)),
            at_once=True,
        )
        log.close()
    index = LogIndex([tmp_path])
    take = LogIndex._take

    def take_losses(self: LogIndex, origin: Any, alike: Any) -> None:
        if NORM.consumer_id in origin.run.block.consumers:
            raise ValueError("a fault of the reader")
        take(self, origin, alike)

    monkeypatch.setattr(LogIndex, "_take", take_losses)
    index.look()
    with pytest.raises(ValueError, match="a fault of the reader"):
        index.read_some(60.0)
    while index.read_some(60.0):
        pass
    assert sum(tap.count for tap in index.taps.rows if tap.name == "loss") == 3
