"""The server answers the page from a real log, to clients with the token only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_live import until

import hostcallback as hcb
from hostcallback.receiver.ui.server.app import MAX_STREAMS
from hostcallback.receiver.ui.server.serving import Listening, serve_logs

Serve = Callable[..., Any]


def tap_of(client: Any, name: str, kind: str) -> Any:
    """The row of a tap in the overview."""
    taps = client.get("/api/overview").raise_for_status().json()["taps"]
    (found,) = [tap for tap in taps if (tap["name"], tap["kind"]) == (name, kind)]
    return found


def test_an_overview_has_the_run_and_its_taps(log: Path, serve: Serve) -> None:
    found = serve(log).get("/api/overview").json()
    (run,) = found["runs"]
    assert run["messages"] == 1501
    assert found["errors"] == 1
    assert [source["kind"] for source in found["sources"]] == ["log"]
    kinds = {(tap["name"], tap["field"], tap["kind"]) for tap in found["taps"]}
    assert {("train", "loss", "scalar"), ("weights", "w", "histogram")} <= kinds


def test_a_chart_keeps_the_largest_and_smallest_values_and_zooms_to_single_messages(
    log: Path, serve: Serve
) -> None:
    client = serve(log)
    tap = tap_of(client, "train", "scalar")
    assert tap["count"] == 500
    (whole,) = client.get("/api/series", params={"tap": tap["id"], "points": 20}).json()["series"]
    assert len(whole["x"]) <= 20
    assert not whole["exact"]
    assert max(whole["max"]) == 1.0
    assert abs(min(whole["min"]) - 1 / 500) < 1e-6
    assert (whole["nonfinite"], whole["nonfinite_count"]) == ([[9.0, "nan"]], 1)
    (zoomed,) = client.get("/api/series", params={"tap": tap["id"], "from": 5, "to": 12}).json()["series"]
    assert zoomed["exact"]
    assert zoomed["x"] == [5, 6, 7, 8, 10, 11, 12]
    assert zoomed["min"] == zoomed["max"] == zoomed["mean"]


def test_all_values_that_are_not_finite_count_and_the_first_hundred_have_a_place(
    tmp_path: Path, serve: Serve
) -> None:
    @jax.jit
    def train() -> Any:
        return jax.lax.scan(
            lambda c, n: (c, hcb.metrics({"loss": jnp.where(n < 50, n, jnp.inf)}, step=n)), 0, jnp.arange(300)
        )[0]

    with hcb.outfeed_receiver(record=tmp_path / "many"):
        train()
    client = serve(tmp_path / "many")
    (tap,) = client.get("/api/overview").json()["taps"]
    (shown,) = client.get("/api/series", params={"tap": tap["id"]}).json()["series"]
    assert shown["nonfinite_count"] == 250
    assert shown["nonfinite"] == [[50.0 + place, "inf"] for place in range(100)]


def test_values_that_are_not_finite_have_a_place_on_each_axis(tmp_path: Path, serve: Serve) -> None:
    @jax.jit
    def send() -> Any:
        def step(carry: Any, i: Any) -> Any:
            hcb.metrics({"never": i * jnp.inf, "some": jnp.where(i % 4 == 3, jnp.nan, i)}, step=10 * i)
            return carry, None

        return jax.lax.scan(step, 0, jnp.arange(1, 9))[0]

    with hcb.outfeed_receiver(record=tmp_path / "taps"):
        send()
    client = serve(tmp_path / "taps")
    taps = {tap["title"]: tap["id"] for tap in client.get("/api/overview").json()["taps"]}

    def marked(title: str, axis: str) -> Any:
        found = client.get("/api/series", params={"tap": taps[title], "axis": axis}).json()["series"][0]
        return [x for x, _ in found["nonfinite"]], found

    assert marked("never", "step")[0] == [10.0 * n for n in range(1, 9)]
    assert marked("never", "message")[0] == [*range(8)]
    assert marked("some", "step")[0] == [30.0, 70.0]
    assert marked("some", "message")[0] == [2.0, 5.0]
    for axis in ("time", "elapsed"):
        first, series = marked("some", axis)
        assert series["first"] <= first[0] <= first[1] <= series["last"]
        assert len(marked("never", axis)[0]) == 8


def test_complex_numbers_are_measured_by_their_magnitudes(tmp_path: Path, serve: Serve) -> None:
    @jax.jit
    def send() -> Any:
        def step(carry: Any, i: Any) -> Any:
            hcb.tap(lambda value: None, jax.lax.complex(3.0, 4.0) * i, name="one")
            hcb.tap(lambda value: None, jnp.array([3 + 4j, 0j, jnp.inf]) * i, name="few")
            hcb.tap(lambda value: None, jnp.full(32, 3 + 4j) * i, name="many")
            return carry, None

        return jax.lax.scan(step, 0, jnp.arange(4))[0]

    with hcb.outfeed_receiver(record=tmp_path / "taps"):
        send()
    client = serve(tmp_path / "taps")
    one, few, many = (
        tap_of(client, *tap) for tap in (("one", "scalar"), ("few", "array"), ("many", "histogram"))
    )
    assert one["complex"]
    assert one["last"] == 15.0
    (series,) = client.get("/api/series", params={"tap": one["id"]}).json()["series"]
    assert series["mean"] == [0, 5, 10, 15]
    array = client.get("/api/array", params={"tap": few["id"]}).json()
    assert array["values"][0] == {"real": 9.0, "imag": 12.0}
    assert (array["stats"]["max"], array["stats"]["zeros"], array["stats"]["nonfinite"]) == (15.0, 1, 1)
    heatmap = client.get("/api/heatmap", params={"tap": many["id"]}).json()
    assert heatmap["edges"][-1] == 15.0
    assert [sum(counts) for counts in heatmap["taps"][0]["counts"]] == [32] * 4
    (run,) = client.get("/api/runs").json()["runs"]
    assert run["metrics"] == {"|one|": [15.0, 0.0, 15.0]}


def test_a_failed_check_is_shown_with_its_line_and_values(log: Path, serve: Serve) -> None:
    (group,) = serve(log).get("/api/errors").json()["groups"]
    assert (group["kind"], group["count"]) == ("check", 1)
    assert group["title"] == "seven came, x is 7.0"
    assert any('hcb.check(number != 7, "seven' in text for _, text in group["source"])
    assert group["per"][0]["count"] == 1


def test_operations_that_made_nan_are_shown_at_their_lines(tmp_path: Path, serve: Serve) -> None:
    @hcb.watch_nonfinite
    @jax.jit
    def divide(x: Any) -> Any:
        return jnp.log(x) / x

    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        divide(jnp.float32(0)).block_until_ready()  # the call that failed
    client = serve(tmp_path)
    (found,) = client.get("/api/errors").json()["groups"]
    assert (found["kind"], found["count"]) == ("nonfinite", 1)
    assert found["title"].startswith("log: 0 NaN and 1 infinite values in float32[], ")
    assert "operand 0 = 0" in found["values"]
    assert any("return jnp.log(x) / x" in text for _, text in found["source"])
    assert "test_server.py" in found["place"]
    assert client.get("/api/overview").json()["errors"] == 1


def test_the_token_of_the_address_becomes_a_secret_of_the_session(log: Path, serve: Serve) -> None:
    client = serve(log)
    token = client.headers.pop("Authorization")
    page = client.get("/")  # its files are everybody's
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/api/overview").status_code == 401
    assert client.get("/api/overview", params={"token": token.partition(" ")[2]}).status_code == 401
    answer = client.post("/api/session", headers={"Authorization": token})
    assert "set-cookie" not in answer.headers
    with_session = {"Authorization": f"Bearer {answer.json()['session']}"}
    assert client.get("/api/overview", headers=with_session).status_code == 200
    assert client.post("/api/session", headers=with_session).status_code == 401
    # Neither another server nor a later one on its port takes the secret.
    assert serve(log).get("/api/overview", headers=with_session).status_code == 401


def test_wrong_tokens_and_foreign_hosts_are_refused(log: Path, serve: Serve) -> None:
    client = serve(log)
    for path in ("/api/overview", "/api/session", "/api/"):
        for given in ("Bearer wrong", "Bearer", "", "Basic wrong", "Bearer \u00e9"):
            headers = {"Authorization": given.encode()}
            assert client.get(path, headers=headers).status_code == 401
    foreign = client.get("/api/overview", headers={"Host": "evil.example"})
    assert (foreign.status_code, "evil.example" in foreign.json()["error"]) == (421, True)
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_events_tell_what_has_changed(log: Path, serve: Serve) -> None:
    client = serve(log)
    tap = tap_of(client, "train", "scalar")
    with client.stream("GET", "/api/events", params={"watch": tap["id"]}) as stream:
        data = next(line for line in stream.iter_lines() if line.startswith("data:"))
    assert f"[[{tap['id']}, 500, " in data


def test_the_charts_of_many_runs_are_watched(log: Path, serve: Serve) -> None:
    many = ",".join(map(str, range(1000)))
    with serve(log).stream("GET", "/api/events", params={"watch": many}) as stream:
        assert stream.status_code == 200


def test_pages_that_are_gone_make_room_for_others(log: Path, serve: Serve) -> None:
    client = serve(log)

    def status() -> int:
        with client.stream("GET", "/api/events") as stream:
            return int(stream.status_code)

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(client.stream("GET", "/api/events")) for _ in range(MAX_STREAMS)]
        lines = [stream.iter_lines() for stream in opened]  # one that is dropped closes its stream
        assert all("retry" in next(each) for each in lines)
        assert status() == 503
    until(status, lambda found: found == 200)  # the log has ended, so nothing is sent to those that are gone


def test_only_the_log_that_grows_is_live(log: Path, serve: Serve, tmp_path: Path) -> None:
    def states(client: Any) -> list[str]:
        return [source["state"] for source in client.get("/api/overview").json()["sources"]]

    with hcb.outfeed_receiver(record=tmp_path):
        descend(jnp.float32(1), jnp.float32(0)).block_until_ready()
        hcb.barrier_wait()
        both = serve(log, tmp_path)
        assert states(both) == ["ended", "live"]
    # At the first answer, and while a page is open.
    assert states(serve(tmp_path)) == ["ended"]
    until(lambda: states(both), lambda found: found == ["ended", "ended"])


def test_texts_come_from_the_last_one_backwards_and_can_be_searched(log: Path, serve: Serve) -> None:
    client = serve(log)
    found = client.get("/api/texts", params={"limit": 30}).json()
    assert found["total"] == 1501
    assert [line["text"] for line in found["lines"] if line["text"].startswith("at ")][-1] == "at 499.0"
    earlier = client.get("/api/texts", params={"limit": 30, "before": found["next"]}).json()
    assert earlier["lines"][-1]["time"] <= found["lines"][0]["time"]
    both = [line["cursor"] for line in earlier["lines"] + found["lines"]]
    assert len(set(both)) == 60
    again = client.get("/api/texts", params={"limit": 30, "after": earlier["lines"][-1]["cursor"]}).json()
    assert [line["cursor"] for line in again["lines"]] == both[30:]
    (error,) = client.get("/api/texts", params={"q": "SEVEN CAME"}).json()["lines"]
    assert (error["level"], error["device"], error["place"].count("conftest.py:")) == ("check", "cpu:0", 1)


def test_texts_are_filtered_by_kind_sender_step_and_source_line(told: Path, serve: Serve) -> None:
    client = serve(told)

    def texts(**query: Any) -> list[str]:
        return [
            line["text"] for line in client.get("/api/texts", params=query).raise_for_status().json()["lines"]
        ]

    (printed, *_) = client.get("/api/texts", params={"show": "print"}).json()["lines"]
    assert (printed["text"], printed["level"]) == ("printed 0", "print")
    assert len(texts()) == 31
    assert len(texts(show="print")) == 10
    assert len(texts(show="log")) == 20
    assert len(texts(show="warning")) == 11
    assert texts(show="error") == ["check failed: failed 2"]
    assert texts(show="progress") == []
    assert texts(show="log", device=printed["device"], **{"from": 3}) == [
        "noted 3",
        "warned 3",
        "noted 4",
        "warned 4",
    ]
    assert texts(show="print", process=printed["process"], to=1) == ["printed 0", "printed 1"]
    assert texts(process="another") == []
    place, line = printed["place"].partition(" ")[0].rsplit("/", 1)[-1].split(":")
    assert len(texts(place=f"{place}:{line}")) == 10
    assert texts(place=f"{place}:{line[:-1]}") == []  # line 4 is not line 42
    assert client.get("/api/texts", params={"show": "moon"}).status_code == 400


def test_arrays_have_statistics_and_histograms_over_the_steps(log: Path, serve: Serve) -> None:
    client = serve(log)
    tap = tap_of(client, "weights", "histogram")
    last = client.get("/api/array", params={"tap": tap["id"]}).json()
    assert (last["step"], last["shape"], last["count"]) == (499, [64], 500)
    assert (last["stats"]["max"], last["values"][1]) == (63 * 499, 499)
    assert client.get("/api/array", params={"tap": tap["id"], "at": 3}).json()["step"] == 3
    drawn = client.get("/api/heatmap", params={"tap": tap["id"], "columns": 10}).json()
    (drawn,) = drawn["taps"]
    assert (len(drawn["x"]), drawn["x"][0], drawn["x"][-1]) == (10, 0, 499)
    assert all(sum(counts) == 64 for counts in drawn["counts"])
    zoomed = client.get("/api/heatmap", params={"tap": tap["id"], "from": 100, "to": 104}).json()
    assert zoomed["taps"][0]["x"] == [100, 101, 102, 103, 104]


@jax.jit
def descend(start: Any, planted: Any) -> Any:
    """Sends 50 losses; those from step 30 on are `planted` larger."""

    def step(number: Any, x: Any) -> Any:
        hcb.id_tap(ignore, {"step": number, "loss": x + jnp.where(number >= 30, planted, 0.0)}, name="loss")
        hcb.id_tap(ignore, {"step": number, "same": x}, name="same")
        return x * 0.5

    return jax.lax.fori_loop(0, 50, step, start)


def ignore(value: Any) -> None:
    """A tap function."""


def test_two_runs_are_compared_and_shown_side_by_side(tmp_path: Path, serve: Serve) -> None:
    for name, planted in (("one", 0.0), ("two", 0.25)):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=name)]):
            descend(jnp.float32(1), jnp.float32(planted)).block_until_ready()
    client = serve(tmp_path)
    overview = client.get("/api/overview").json()
    assert {run["id"] for run in overview["runs"]} == {"one", "two"}
    assert sorted(tap["run"] for tap in overview["taps"] if tap["field"] == "loss") == ["one", "two"]
    found = client.get("/api/diff", params={"left": "one", "right": "two"}).json()
    assert (found["equal"], found["first"]["tap"], found["first"]["step"]) == (False, "loss", 30)
    loss, same = found["taps"]
    assert (loss["compared"], loss["differing"], loss["first_step"]) == (50, 20, 30)
    assert abs(loss["max_abs"] - 0.25) < 1e-6
    assert loss["x"] == [*range(30, 50)]
    assert (same["compared"], same["differing"]) == (50, 0)
    assert client.get("/api/diff", params={"left": "one", "right": "one"}).json()["equal"]
    assert client.get("/api/diff", params={"left": "one", "right": "two", "atol": 1}).json()["equal"]
    assert client.get("/api/diff", params={"left": "one", "right": "three"}).status_code == 404


def test_taps_of_two_runs_are_compared_though_their_lines_have_moved(tmp_path: Path, serve: Serve) -> None:
    def before(x: Any) -> None:
        hcb.id_tap(ignore, x, name="loss")

    def after(x: Any) -> None:
        hcb.id_tap(ignore, x + 1, name="loss")

    for name, program in (("one", before), ("two", after)):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=name)]):
            jax.jit(program)(jnp.float32(1))
    found = serve(tmp_path).get("/api/diff", params={"left": "one", "right": "two"}).json()
    assert [(tap["name"], tap["compared"], tap["differing"]) for tap in found["taps"]] == [("loss", 1, 1)]
    assert found["notes"] == []


@pytest.mark.slow_variants
@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_comes_as_the_server_ends_is_closed(log: Path, turns: int) -> None:
    server = serve_logs([log], Listening())
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    late: list[socket.socket] = []

    async def ends(counter: int) -> bool:
        late.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        for _ in range(turns):  # of asyncio's loop, which accepts the connection, and then makes it
            await asyncio.sleep(0)
        return True

    server._server.on_tick = ends  # type: ignore[method-assign]
    until(lambda: late, bool)
    server.close()
    assert not server._server.server_state.connections
    with late[0], contextlib.suppress(ConnectionResetError):
        assert late[0].recv(1) == b""
    gc.collect()  # tells of what was not closed


def test_bars_make_no_difference_of_two_runs(tmp_path: Path, serve: Serve) -> None:
    pytest.importorskip("tqdm")

    def step(x: Any, number: Any) -> Any:
        hcb.metrics({"loss": x}, step=number, name="train")
        return x * 0.5, None

    for name, shown in (("one", 1.0), ("two", 2.0)):
        bar = hcb.Progress("bar", postfix=functools.partial(lambda shown, carry, y: {"shown": shown}, shown))
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=name)]):
            jax.jit(lambda x, bar=bar: hcb.scan(step, x, jnp.arange(9), progress=bar))(1.0)
    found = serve(tmp_path).get("/api/diff", params={"left": "one", "right": "two"}).json()
    assert (found["equal"], found["first"]) == (True, None)
    assert [(tap["name"], tap["compared"]) for tap in found["taps"]] == [("train", 9)]
    assert found["notes"] == [
        "1 tap is left out, because the messages of bars and times depend on the clock: bar"
    ]
