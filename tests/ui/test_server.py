"""The server answers the page from a real log, to clients with the token only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    assert whole["nonfinite"] == [[9.0, "nan"]]
    (zoomed,) = client.get("/api/series", params={"tap": tap["id"], "from": 5, "to": 12}).json()["series"]
    assert zoomed["exact"]
    assert zoomed["x"] == [5, 6, 7, 8, 10, 11, 12]
    assert zoomed["min"] == zoomed["max"] == zoomed["mean"]


def test_a_failed_check_is_shown_with_its_line_and_values(log: Path, serve: Serve) -> None:
    (group,) = serve(log).get("/api/errors").json()["groups"]
    assert (group["kind"], group["count"]) == ("check", 1)
    assert group["title"] == "seven came, x is 7.0"
    assert any('hcb.check(number != 7, "seven' in text for _, text in group["source"])
    assert group["per"][0]["count"] == 1


def test_the_token_of_the_address_becomes_a_cookie(log: Path, serve: Serve) -> None:
    client = serve(log)
    del client.headers["Authorization"]
    assert client.get("/api/overview").status_code == 401
    answer = client.get("/", params={"token": client.address.partition("token=")[2]})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/api/overview").status_code == 200
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_wrong_tokens_and_foreign_hosts_are_refused(log: Path, serve: Serve) -> None:
    client = serve(log)
    assert client.get("/api/overview", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", params={"token": "wrong"}).status_code == 401
    foreign = client.get("/api/overview", headers={"Host": "evil.example"})
    assert (foreign.status_code, "evil.example" in foreign.json()["error"]) == (421, True)


def test_events_tell_what_has_changed(log: Path, serve: Serve) -> None:
    client = serve(log)
    tap = tap_of(client, "train", "scalar")
    with client.stream("GET", "/api/events", params={"watch": tap["id"]}) as stream:
        data = next(line for line in stream.iter_lines() if line.startswith("data:"))
    assert f"[[{tap['id']}, 500, " in data
