"""What the page shows of real logs, in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_taps import write_many
from test_server import descend

import hostcallback as hcb
from hostcallback.receiver.ui.index import log_index, taps

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]
HOSTILE = "<script>alert(1)</script>", "\u202etxt.exe", "n" * 600, "<img src=x onerror=alert(2)>", "__proto__"


def recorded(folder: Path, names: tuple[str, ...]) -> Path:
    """The log of a program that sends a number once by each tap."""

    @jax.jit
    def emit(x: Any) -> Any:
        for name in names:
            hcb.id_tap(lambda value: None, x, name=name)
        hcb.print("<b>{x}</b>", x=x)
        return x

    with hcb.outfeed_receiver(record=folder):
        emit(np.float32(1)).block_until_ready()
    return folder


def test_errors_come_first_with_the_planted_line(visit: Visit, serve: Any, expect: Any, log: Path) -> None:
    page = visit(serve(log).address)
    expect(page.get_by_role("tab", name=re.compile("^Errors"))).to_have_attribute("aria-selected", "true")
    card = page.get_by_role("article").filter(has_text="seven came")
    card.wait_for()
    assert 'hcb.check(number != 7, "seven came' in card.locator(".source .marked").inner_text()
    assert "x is 7.0" in card.inner_text()  # in one iteration of a loop: its step is not known
    assert "token" not in page.url
    told = "1 different error, which occurred 1 time"
    expect(page.locator("#error-count")).to_have_attribute("aria-label", told)
    page.get_by_text(told).wait_for()


def test_a_zoom_loads_detail_and_a_double_click_shows_all(
    visit: Visit, serve: Any, expect: Any, log: Path
) -> None:
    page = visit(serve(log).address, "Charts", viewport={"width": 600, "height": 800})
    card = page.get_by_role("article", name="train loss")
    plot = card.locator(".u-over")
    plot.wait_for()
    expect(card).to_contain_text("not finite, the first: nan at 9")
    box = plot.bounding_box()
    with page.expect_response(lambda answer: "/api/series" in answer.url and "from=" in answer.url) as zoomed:
        page.mouse.move(box["x"] + 20, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 60, box["y"] + 60, steps=4)
        page.mouse.up()
    (series,) = zoomed.value.json()["series"]
    assert series["exact"]
    assert 0 < series["x"][0] < series["x"][-1] < 150
    card.get_by_text("Every message is a point.").wait_for()
    page.mouse.move(box["x"] + 40, box["y"] + 50)
    tip = card.locator(".tip")
    tip.wait_for()
    assert re.match(r"step \d+\n", tip.inner_text())
    with page.expect_response(lambda answer: "/api/series" in answer.url and "from=" not in answer.url):
        plot.dblclick()
    expect(card.get_by_role("button", name="Show all")).to_have_count(0)


def test_the_keyboard_reaches_tabs_charts_and_their_values(visit: Visit, serve: Any, log: Path) -> None:
    page = visit(serve(log).address, "Charts")
    page.get_by_role("tab", name="Charts").press("ArrowRight")
    page.get_by_role("log", name="Texts").wait_for()
    page.get_by_role("tab", name="Texts").press("ArrowLeft")
    chart = page.get_by_role("article", name="train loss").get_by_role("application")
    chart.locator(".u-over").wait_for()
    chart.focus()
    chart.press("ArrowRight")
    chart.locator(".tip").wait_for()
    with page.expect_response(lambda answer: "/api/series" in answer.url and "from=" in answer.url):
        chart.press("+")
    assert page.evaluate("document.activeElement.className").startswith("plot")


def test_texts_are_searched(visit: Visit, serve: Any, expect: Any, log: Path) -> None:
    page = visit(serve(log).address, "Texts")
    rows = page.locator(".text-row")
    rows.last.wait_for()
    expect(rows.last).to_contain_text("499")
    page.get_by_label("Search").fill("at 123")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("at 123.0")
    page.get_by_label("Search").fill("not there at all")
    page.get_by_role("heading", name="No text matches").wait_for()


def test_texts_are_filtered_by_kind_device_step_and_source_line(
    visit: Visit, serve: Any, expect: Any, told: Path
) -> None:
    page = visit(serve(told).address, "Texts")
    rows = page.locator(".text-row")
    expect(rows).to_have_count(31)
    expect(rows.last).to_contain_text("cpu:1")
    page.locator("#text-show").select_option("warnings, errors and failures")
    expect(rows).to_have_count(11)
    expect(page.locator(".text-level.warning")).to_have_count(10)
    expect(page.locator(".text-level.bad")).to_have_text("failed check")
    page.locator("#text-device").select_option("cpu:0")
    expect(rows).to_have_count(6)
    page.get_by_label("From step").fill("3")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Clear the filters").click()
    expect(rows).to_have_count(31)
    rows.filter(has_text="printed 12").get_by_role(
        "button", name=re.compile("Show the texts of conftest.py")
    ).click()
    expect(rows).to_have_count(10)
    assert re.match(r"conftest.py:\d+$", page.locator("#text-place").input_value())
    page.get_by_label("Search").fill("printed 1")
    expect(rows).to_have_count(6)


def test_two_runs_are_overlaid_and_compared(visit: Visit, serve: Any, expect: Any, tmp_path: Path) -> None:
    for run, planted in (("one", 0.0), ("two", 0.25)):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=run)]):
            descend(jnp.float32(0), jnp.float32(planted)).block_until_ready()
    page = visit(serve(tmp_path).address, "Charts")
    card = page.get_by_role("article", name="loss loss")
    card.locator(".u-over").wait_for()
    expect(card.locator(".legend-item")).to_have_count(2)
    shown = page.get_by_role("group", name="Runs that are shown").get_by_role("button")
    shown.nth(1).wait_for()
    shown.nth(0).click()
    expect(shown.nth(0)).to_have_attribute("aria-pressed", "false")
    page.get_by_role("tab", name="Compare").click()
    verdict = page.locator(".verdict")
    verdict.wait_for()
    expect(verdict).to_contain_text("step 30 in loss loss")
    expect(page.get_by_role("button", name=re.compile("^loss"))).to_contain_text("20 of 50 differ")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_log_with_nothing_says_what_to_do_next(
    visit: Visit, serve: Any, empty_log: Path, width: int
) -> None:
    page = visit(serve(empty_log).address, viewport={"width": width, "height": 800}, color_scheme="dark")
    page.get_by_role("heading", name="No charts yet").wait_for()
    for tab, text in (
        ("Errors", "No errors"), ("Texts", "No texts yet"), ("Devices", "No devices yet"),
        ("Compare", "One run is not enough"), ("Control", "This page is read-only"),
    ):  # fmt: skip
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("heading", name=text).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_one_message_is_a_point(visit: Visit, serve: Any, expect: Any, tmp_path: Path) -> None:
    page = visit(serve(recorded(tmp_path / "one", ("only",))).address)
    card = page.get_by_role("article", name="only")
    card.locator(".u-over").wait_for()
    expect(card.locator(".legend b")).to_have_text("1")


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_stay_text_and_inside_the_page(
    visit: Visit, serve: Any, tmp_path: Path, width: int
) -> None:
    page = visit(serve(recorded(tmp_path / "log", HOSTILE)).address, viewport={"width": width, "height": 900})
    page.get_by_role("heading", name=HOSTILE[0]).wait_for()
    page.get_by_role("heading", name=HOSTILE[4]).wait_for()
    assert page.locator("main script, main img").count() == 0
    for tab in ("Charts", "Texts", "Devices", "Control"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("tab", name="Texts").click()
    page.locator(".text-body", has_text="<b>1.0</b>").wait_for()


def test_more_taps_than_are_kept_are_listed_in_part(
    visit: Visit, serve: Any, expect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "MAX_TAPS", 3_000)
    monkeypatch.setattr(log_index, "MAX_DESCRIBED", 3_000)
    write_many(tmp_path, 5_000)
    page = visit(serve(tmp_path).address, "Charts")
    page.get_by_text("2,000 of 3,000 taps are listed").wait_for()
    page.get_by_text(re.compile(r"About [\d,]+ further taps are left out")).wait_for()
    expect(page.get_by_role("article")).to_have_count(60)
    page.get_by_role("button", name="Show 60 more").click()
    expect(page.get_by_role("article")).to_have_count(120)
    assert page.locator(".u-over").count() < 40  # what is far below the screen is not drawn
    page.get_by_label("Filter").fill("layer_2999")
    expect(page.get_by_role("article")).to_have_count(1)


TICKS = [
    ([1100, 1200, 1300], False, ["1.1k", "1.2k", "1.3k"]),
    ([1112, 1113, 1114], False, ["1,112", "1,113", "1,114"]),
    ([0, 500, 1000, 1500], False, ["0", "0.5k", "1.0k", "1.5k"]),
    ([0.5, 0.75, 1.0], False, ["0.50", "0.75", "1.00"]),
    ([0, 0.0005, 0.001], False, ["0", "5e-4", "0.0010"]),
    ([2.5e-6, 5e-6, 7.5e-6, 1e-5], False, ["2.5e-6", "5.0e-6", "7.5e-6", "1.00e-5"]),
    ([-2, -1, 0, 1], False, ["-2", "-1", "0", "1"]),
    ([2e13, 4e13], False, ["2e13", "4e13"]),
    ([0.00001, 0.001, 1, 10000, None], True, ["1e-5", "0.001", "1", "10k", ""]),
]


def test_labels_of_an_axis_have_one_unit_and_their_digits(visit: Visit, serve: Any, log: Path) -> None:
    page = visit(serve(log).address)
    for ticks, is_log, labels in TICKS:
        told = page.evaluate(
            "([ticks, log]) => import('./core/format.js').then(m => m.tickNumbers(ticks, log))",
            [ticks, is_log],
        )
        assert [label.replace("\N{MINUS SIGN}", "-") for label in told] == labels
    times = page.evaluate(
        "import('./core/format.js').then(m => m.tickTimes([1700000000, 1700003600, 1700049600 + 86400]))"
    )
    assert [label.count("\n") for label in times] == [1, 0, 1]
    assert "Nov" in times[0]


def test_the_leaves_of_a_tap_are_in_the_same_messages(visit: Visit, serve: Any, log: Path) -> None:
    page = visit(serve(log).address)
    leaves = [
        {"run": run, "place": place, "count": count}
        for run, place, count in [("a", "x:1", 7), ("a", "x:1", 7), ("a", "y:2", 3), ("b", "x:1", 5)]
    ]
    assert page.evaluate("taps => import('./views/control.js').then(m => m.messages(taps))", leaves) == 15


DRAWN = """
drawn = [];
fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
  drawn.push(text);
  fillText.call(this, text, ...rest);
};
"""

MARKS = """
window.marks = [];
const line = CanvasRenderingContext2D.prototype.moveTo;
CanvasRenderingContext2D.prototype.moveTo = function (x, y) {
  if (this.fillStyle === "#c4302b") marks.push(x);
  return line.call(this, x, y);
};
"""


def test_a_chart_of_zeros_has_small_numbers_at_its_axis(tmp_path: Path, serve: Any, visit: Visit) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        hcb.metrics({"zero": 0.0}, step=0)
        hcb.metrics({"three": 3.0}, step=0)
    page = visit(serve(tmp_path).address, "Charts", prepare=lambda page: page.add_init_script(DRAWN))
    page.locator(".u-over").nth(1).wait_for()
    page.wait_for_timeout(500)
    drawn = set(page.evaluate("drawn"))
    assert "0.5" in drawn
    assert not {"20", "50", "100"} & drawn


def test_a_chart_of_tiny_numbers_has_their_sizes_at_its_axis(
    tmp_path: Path, serve: Any, visit: Visit, expect: Any
) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        for step in range(4):
            hcb.metrics({"tiny": 1e-20 * (1 + step), "tiniest": -1e-30 * (1 + step)}, step=step)
    page = visit(serve(tmp_path).address, "Charts", prepare=lambda page: page.add_init_script(DRAWN))
    expect(page.locator(".u-over")).to_have_count(2)
    page.wait_for_timeout(500)
    drawn = {label.replace("\N{MINUS SIGN}", "-") for label in page.evaluate("drawn")}
    assert {f"{n}e-20" for n in range(1, 5)} | {f"-{n}e-30" for n in range(1, 5)} <= drawn


def test_a_metric_without_a_finite_value_has_marks_and_says_so(
    tmp_path: Path, serve: Any, visit: Visit, expect: Any
) -> None:
    with hcb.outfeed_receiver(record=tmp_path):
        for step in range(5, 10):
            hcb.metrics({"lost": np.float32(np.nan)}, step=step)
    page = visit(serve(tmp_path).address, "Charts", prepare=lambda page: page.add_init_script(MARKS))
    card = page.get_by_role("article", name="lost")
    expect(card.locator(".card-note")).to_have_text("▲ 5 values not finite, the first: nan at 5")
    card.locator(".u-over").wait_for()
    page.wait_for_timeout(500)
    places = page.evaluate("marks")[-5:]
    assert places == sorted(places)
    over = card.locator(".u-over").bounding_box()
    assert abs(places[-1] - places[0] - over["width"]) < 2
    page.get_by_label("Over").select_option("message")
    expect(card.locator(".card-note")).to_have_text("▲ 5 values not finite, the first: nan at 0")
    page.get_by_label("Over").select_option("elapsed")
    expect(card.locator(".card-note")).to_contain_text(re.compile(r"first: nan after \d+ (µs|ms|s)"))


def test_arguments_of_texts_make_no_charts(visit: Visit, serve: Any, expect: Any, told: Path) -> None:
    page = visit(serve(told).address, "Charts")
    cards = page.get_by_role("article")
    expect(cards).to_have_count(1)
    expect(cards).to_have_attribute("aria-label", "steps step")


def test_the_steps_of_failures_are_listed(visit: Visit, serve: Any, expect: Any, tmp_path: Path) -> None:
    step = jax.jit(lambda ok, number: hcb.check(ok, "bad", step=number))
    with hcb.outfeed_receiver(record=tmp_path, on_error="warn"):
        for number in range(2000, 2040):
            step(number not in (2003, 2004, 2005, 2030), number)
    card = visit(serve(tmp_path).address, "Errors").get_by_role("article", name="bad")
    expect(card.locator(".error-when")).to_contain_text(
        re.compile("first step 2003 at .*last step 2030 at .*at steps 2003 to 2005, 2030")
    )
