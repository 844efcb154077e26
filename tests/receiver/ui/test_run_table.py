"""Runs have names, configurations and a table of results; they are compared step by step."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_server import descend, ignore

import hcb_command
import hostcallback as hcb

Serve = Callable[..., Any]


UNNAMED = [f"train-alice-20261122T20150{number}-3fa9c{number}" for number in range(4)]
"""Names as programs get them that name no run."""


def recorded(folder: Path, run: str, planted: float = 0.0, **options: Any) -> None:
    """Records `descend` under a name."""
    with hcb.outfeed_receiver(sinks=[hcb.record(folder, run=run, **options)]):
        descend(jnp.float32(1), jnp.float32(planted)).block_until_ready()


def test_a_run_that_was_continued_has_its_last_configuration(tmp_path: Path, serve: Serve) -> None:
    for rate in (0.1, 0.2):
        recorded(tmp_path, "one", config={"lr": rate})
    (run,) = serve(tmp_path).get("/api/runs").json()["runs"]
    assert run["config"] == {"lr": 0.2}


def test_runs_without_names_are_called_by_what_differs(tmp_path: Path, serve: Serve) -> None:
    first, second, *_ = UNNAMED
    model = {"width": 64, "layers": [1, 2]}
    recorded(tmp_path, first, config={"lr": 0.1, "model": model, "notes": "first try"})
    recorded(tmp_path, second, 0.25, config={"lr": np.float32(0.5), "model": model, "notes": "second try"})
    client = serve(tmp_path)
    assert [run["name"] for run in client.get("/api/overview").json()["runs"]] == ["lr=0.1", "lr=0.5"]
    found = client.get("/api/runs").json()
    assert found["differing"] == ["lr", "notes"]
    one, two = found["runs"]
    assert one["config"] == {
        "lr": 0.1, "model.width": 64, "model.layers": "[1, 2]", "notes": "first try"
    }  # fmt: skip
    assert one["metrics"]["loss/loss"] == [0.5**49, 0.5**49, 1.0]
    assert two["metrics"]["loss/loss"] == [0.25, 0.5**29, 1.0]


def test_a_run_that_diverged_has_no_number_where_there_is_none(tmp_path: Path, serve: Serve) -> None:
    for run, values in {"nan": (2.0, 1.0, jnp.nan), "infinite": (2.0, 1.0, jnp.inf)}.items():
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=run)]):
            for step, value in enumerate(values):
                hcb.metrics({"loss": jnp.float32(value)}, step=step)
    for run in serve(tmp_path).get("/api/runs").json()["runs"]:
        last_and_finite_range = run["metrics"]["loss"]
        assert last_and_finite_range == [None, 1.0, 2.0]


def test_runs_of_folders_have_the_folders_names_and_equal_ones_the_time(tmp_path: Path, serve: Serve) -> None:
    first, second, third, fourth = UNNAMED
    recorded(tmp_path / "small", first)
    recorded(tmp_path / "large", second)
    recorded(tmp_path / "both", third)
    recorded(tmp_path / "both", fourth)
    named = {run["id"]: run["name"] for run in serve(tmp_path).get("/api/overview").json()["runs"]}
    assert (named[first], named[second]) == ("small", "large")
    assert named[third].startswith("train ")
    assert len({*named.values()}) == 4


def test_long_names_lose_what_they_have_in_common(tmp_path: Path, serve: Serve) -> None:
    for rate in ("0.002", "0.004"):
        recorded(tmp_path, f"baseline-with-large-batches-lr-{rate}")
    names = [run["name"] for run in serve(tmp_path).get("/api/overview").json()["runs"]]
    assert names == ["…0.002", "…0.004"]


def test_a_run_of_two_devices_is_compared_in_the_order_of_its_steps(tmp_path: Path, serve: Serve) -> None:
    @jax.jit
    def emit(planted: Any) -> Any:
        def step(number: Any, x: Any) -> Any:
            hcb.id_tap(ignore, {"step": number, "loss": x + planted}, name="loss")
            return x + 1

        return jax.lax.fori_loop(0, 1500, step, planted * 0)

    for run, planted in (("one", 0.0), ("two", 0.25)):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=run)]):
            for device in jax.devices()[:2]:
                emit(jax.device_put(jnp.float32(planted), device)).block_until_ready()
            if planted:
                hcb.id_tap(ignore, {"step": 1500, "loss": 7.0}, name="loss")
    (loss,) = serve(tmp_path).get("/api/diff", params={"left": "one", "right": "two"}).json()["taps"]
    assert (loss["compared"], loss["differing"], loss["missing"]) == (3000, 3000, 1)
    assert loss["x"] == sorted(loss["x"])
    assert len(loss["x"]) <= 1000
    assert (loss["x"][0], loss["x"][-1] > 1495) == (0, True)
    assert {*loss["difference"]} == {0.25}


def test_texts_of_metrics_are_texts_and_float_pictures_are_pictures(tmp_path: Path, serve: Serve) -> None:
    @jax.jit
    def emit(x: Any) -> Any:
        picture = jnp.linspace(0, 1, 64).reshape(8, 8)
        hcb.metrics({"note": hcb.text("x is {}", x), "plain": "a text", "shown": hcb.image(picture)}, step=x)
        hcb.metrics({"said": "only a text"}, step=x)
        hcb.print("printed {n} of {m}", n=x, m=2 * x)
        hcb.id_tap(ignore, {"step": x, "gray": picture}, name="pixels")
        hcb.id_tap(ignore, {"step": x, "w": picture - 1}, name="weights")
        return x

    with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path)]):
        for number in range(5):
            emit(number)
    client = serve(tmp_path)
    taps = client.get("/api/overview").json()["taps"]
    assert {(tap["title"], tap["kind"]) for tap in taps if tap["kind"] != "text"} == {
        ("shown", "image"), ("pixels/gray", "image"), ("weights/w", "histogram")
    }  # fmt: skip
    lines = client.get("/api/texts", params={"q": "x is 3"}).json()["lines"]
    assert [line["text"] for line in lines] == ["note: x is 3; plain: a text"]
    (shown,) = [tap["id"] for tap in taps if tap["title"] == "shown"]
    strip = client.get("/api/array", params={"tap": shown, "strip": 3}).json()["strip"]
    assert [(number, step) for number, step, _ in strip] == [(0, 0), (2, 2), (4, 4)]
    assert all(image.startswith("data:image/png;base64,") for _, _, image in strip)


def test_pictures_are_as_bright_as_their_numbers(tmp_path: Path, serve: Serve) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.metrics({"shown": hcb.image(jnp.array([[-1.0, 0, 0.5], [1, 2, jnp.nan]]))}, step=1)
        hcb.metrics({"bytes": hcb.image(jnp.array([[0, 1, 128], [254, 255, 255]], jnp.uint8))}, step=1)
    client = serve(tmp_path)
    taps = {tap["title"]: tap["id"] for tap in client.get("/api/overview").json()["taps"]}
    bright = {}
    for title in ("shown", "bytes"):
        ((_, _, image),) = client.get("/api/array", params={"tap": taps[title], "strip": 1}).json()["strip"]
        data = base64.b64decode(image.partition(",")[2])
        length = int.from_bytes(data[33:37])
        assert data[37:41] == b"IDAT"
        rows = zlib.decompress(data[41 : 41 + length])
        assert (rows[0], rows[4], len(rows)) == (0, 0, 8)  # the filter of each row
        bright[title] = [*rows[1:4], *rows[5:8]]
    assert bright == {"shown": [0, 0, 127, 255, 255, 0], "bytes": [0, 1, 128, 254, 255, 255]}


def test_what_cannot_be_compared_is_said_for_both_runs(tmp_path: Path, serve: Serve) -> None:
    sent = {"one": {"loss": jnp.zeros(1)}, "two": {"loss": jnp.zeros(32)}, "three": {"other": jnp.zeros(1)}}
    for run, value in sent.items():
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=run)]):
            hcb.id_tap(ignore, value, name="tap")
    client = serve(tmp_path)

    def first(left: str, right: str) -> Any:
        return client.get("/api/diff", params={"left": left, "right": right}).json()["first"]

    found = first("one", "two")
    assert (found["leaf"], found["left"], found["right"]) == ("loss", "float32[1]", "float32[32]")
    found = first("one", "three")
    assert (found["left"], found["right"]) == ("", "")
    assert found["text"].startswith("the tapped values have different structures")


def test_exceptions_of_tap_functions_are_in_the_log(tmp_path: Path, serve: Serve) -> None:
    def refuse(value: Any) -> None:
        raise ValueError(f"no {int(value)}")

    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        for number in range(3):
            hcb.id_tap(refuse, jnp.int32(number), name="picky")
    client = serve(tmp_path)
    assert client.get("/api/overview").json()["errors"] == 3
    (group,) = client.get("/api/errors").json()["groups"]
    assert (group["kind"], group["title"], group["count"]) == ("tap exception", "ValueError: no 0", 3)
    assert "the last: ValueError: no 2" in group["values"]
    assert "in refuse" in group["traceback"]
    assert "test_run_table.py" in group["place"]


def test_devices_of_a_run_that_has_ended_have_the_rates_of_the_whole_run(told: Path, serve: Serve) -> None:
    devices = serve(told).get("/api/devices").json()["devices"]
    assert [(device["live"], device["rate"] > 0) for device in devices] == [(False, True)] * 2


def test_two_recorders_of_a_process_are_two_devices_and_hcb_stats_has_the_configurations(
    tmp_path: Path, serve: Serve
) -> None:
    recorded(tmp_path / "warm", "one", config={"lr": 0.1, "model": {"width": 64}})
    recorded(tmp_path / "main", "one", config={"lr": 0.1, "model": {"width": 64}})
    devices = serve(tmp_path).get("/api/devices").json()["devices"]
    assert sorted(device["process"].rpartition(", ")[2] for device in devices) == ["main", "warm"]
    assert devices[0]["messages"] == devices[1]["messages"] > 0
    (only,) = serve(tmp_path / "main").get("/api/devices").json()["devices"]
    assert ", " not in only["process"]
    shown = hcb_command.hcb(tmp_path, "stats", "main").stdout
    assert shown.startswith("run one: lr=0.1, model.width=64\n")
    told = hcb_command.hcb(tmp_path, "stats", "main", "--json").stdout
    assert told.startswith('{"run": "one", "config": {"lr": 0.1, "model.width": 64}}\n')
