"""The page follows what changes: a running program, a server that goes away, and another tab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_live import hcb_ui, running, until

from hostcallback.receiver.ui.server.serving import Listening, serve_logs

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]


def address_of(client: Any) -> str:
    """Where browsers open the page."""
    return f"{client.base_url}/#token={client.headers['Authorization'].partition(' ')[2]}"


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
        until(stays(client), bool)
        for page in (first, second):
            page.context.close()


def test_a_knob_is_set_and_the_loops_are_stopped(
    sockets: Path, visit: Visit, expect: Any, tmp_path: Path
) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        page = visit(address_of(client), "Control", refuses="502")
        field = page.get_by_label("the value of damping")
        expect(field).to_have_value("0.5")
        told = page.locator("#knob-told")
        for text, answer in (
            ("0.25", "“damping” is 0.25."),
            ("2", "is from 0 to 1, got 2"),
            ("much", "much is not a value: give a number, true, false or a list of them."),
        ):
            field.fill(text)
            field.press("Enter")
            expect(told).to_contain_text(answer)
            expect(field).to_have_value(text)  # also what was refused, to be mended
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.get_by_role("button", name="Stop loops").click()
        assert process.poll() is None
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Stop loops").click()
        expect(page.locator("#stop-told")).to_have_text("A stop is requested of one process.")
        assert process.wait(60) == 0
        page.context.close()


def test_a_check_is_switched_off_in_the_tab_control(sockets: Path, visit: Visit, expect: Any) -> None:
    with (
        running(sockets, "-", "failing") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        page = visit(address_of(client), "Control")
        row = page.locator("#rule-list li", has_text="always")
        expect(row).to_contain_text("check")
        expect(row.get_by_role("button")).to_have_count(0)  # a limit is for taps
        row.get_by_role("switch").click()
        expect(row.get_by_role("switch")).to_have_attribute("aria-checked", "false")
        until(
            lambda: client.get("/api/overview").json()["taps"],
            lambda taps: [tap["enabled"] for tap in taps if tap["name"] == "always"] == [False],
        )
        page.get_by_role("tab", name="Charts").click()
        page.get_by_role("article", name="loss").wait_for()
        expect(page.get_by_role("article", name="always")).to_have_count(0)
        page.context.close()


def stays(client: Any) -> Callable[[], bool]:
    """Whether no message of `loss` came while another tap of the same program sent fifty."""

    def counts() -> tuple[int, int]:
        taps = client.get("/api/overview").json()["taps"]
        found = {tap["name"]: tap["count"] for tap in taps}
        return found["loss"], found["unlucky"]

    since = counts()

    def look() -> bool:
        nonlocal since
        now = counts()
        if now[0] != since[0]:
            since = now
        return now[1] - since[1] >= 50

    return look


def test_a_tab_keeps_its_session_and_another_one_has_none(
    visit: Visit, expect: Any, log: Path, serve: Callable[..., Any]
) -> None:
    address = serve(log).address
    page = visit(address, "Charts")
    page.get_by_role("article", name="train loss").locator(".u-over").wait_for()
    assert "token" not in page.url
    page.reload()
    page.get_by_role("article", name="train loss").locator(".u-over").wait_for()
    stranger = visit(address.partition("#")[0], refuses="401")
    expect(stranger.locator("#trouble")).to_contain_text("Open the URL that it printed")
    stranger.goto(address)  # in the same tab only what is behind the # differs
    expect(stranger.get_by_role("tab", name="Errors", selected=True)).to_have_count(1)
    assert "token" not in stranger.url
    assert not page.context.cookies()


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


LOOKS = 8
GROWTH_BYTES = 150_000
"""Memory that a page may gain in the second half of the test, in which it draws every tab three times. It gained 120 KB
each time.
"""


@pytest.mark.timeout(300)
def test_a_page_that_stays_open_does_not_grow(sockets: Path, visit: Visit, tmp_path: Path) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        page = visit(address_of(client), "Charts")
        page.get_by_role("article", name="loss loss").locator(".u-over").wait_for()
        tool = page.context.new_cdp_session(page)
        tool.send("Performance.enable")
        found = []
        for _ in range(LOOKS):
            for name in ("Charts", "Texts", "Errors", "Devices", "Control"):
                page.get_by_role("tab", name=name).click()
                page.wait_for_timeout(600)
            tool.send("HeapProfiler.collectGarbage")
            measured = {
                each["name"]: each["value"] for each in tool.send("Performance.getMetrics")["metrics"]
            }
            found.append([measured[name] for name in ("JSHeapUsedSize", "Nodes", "JSEventListeners")])
        page.context.close()
    print(found)
    (heap, nodes, listeners), (heap_then, nodes_then, listeners_then) = found[-1], found[LOOKS // 2]
    assert heap < heap_then + GROWTH_BYTES
    assert nodes < 1.1 * nodes_then
    assert listeners < 1.1 * listeners_then
