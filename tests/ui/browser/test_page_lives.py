"""The page follows what changes: a running program, a server that goes away, and another tab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_live import hcb_ui, running

from hostcallback.receiver.ui.server.serving import Listening, serve_logs

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]


def address_of(client: Any) -> str:
    """Where browsers open the page."""
    return f"{client.base_url}/?token={client.headers['Authorization'].partition(' ')[2]}"


def test_two_tabs_follow_a_program_and_one_switches_its_tap_off(
    sockets: Path, visit: Visit, expect: Any, tmp_path: Path
) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        first, second = (visit(address_of(client), "Charts") for _ in range(2))
        card = first.get_by_role("article", name="loss loss")
        card.locator(".u-over").wait_for()
        value = card.locator(".legend b")
        expect(value).not_to_have_text(value.inner_text())
        switch = card.get_by_role("switch")
        expect(switch).to_have_attribute("aria-checked", "true")
        switch.click()
        other = second.get_by_role("article", name="loss loss").get_by_role("switch")
        expect(other).to_have_attribute("aria-checked", "false")
        second.get_by_role("tab", name="Errors").click()
        raised = second.get_by_role("article").filter(has_text="exception in a tap function")
        expect(raised).to_contain_text("ValueError: a planted\\x1b bug of 0")
        expect(raised.locator(".source .marked")).to_contain_text("hcb.id_tap(fail_once")
        raised.locator("summary").click()
        expect(raised.locator(".traceback")).to_contain_text("in fail_once")
        stopped = until_still(client)
        assert until_still(client) == stopped
        for page in (first, second):
            page.context.close()


def until_still(client: Any) -> int:
    """The messages of `loss`, once two answers agree that lie an update of the server apart."""
    before = -1
    while True:
        (tap,) = client.get("/api/overview", params={"filter": "loss"}).json()["taps"]
        if tap["count"] == before:
            return before
        before = tap["count"]
        with client.stream("GET", "/api/events", params={"watch": tap["id"]}) as events:
            next(line for line in events.iter_lines() if line.startswith("data:"))


def test_a_lost_server_is_told_and_found_again(visit: Visit, log: Path) -> None:
    server = serve_logs([log], Listening(token="known"))
    port = int(server.address.rpartition(":")[2].partition("/")[0])
    page = visit(server.address, "Charts", loses_server=True)
    page.get_by_role("article", name="train loss").locator(".u-over").wait_for()
    server.close()
    page.get_by_text("The connection to the server is lost").wait_for()
    assert page.get_by_role("article", name="train loss").is_visible()
    again = serve_logs([log], Listening(token="known", port=port))
    try:
        page.get_by_text("The connection is back").wait_for()
        with page.expect_response(lambda answer: "/api/series" in answer.url):
            page.locator("#axis").select_option("message")
    finally:
        page.close()
        again.close()
