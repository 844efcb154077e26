"""Several runs on the page: the table, a baseline, cards of all runs, groups, and what a card saves, in Chromium."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]
STEPS = 40


@jax.jit
def train(rate: Any) -> Any:
    """Sends metrics of two groups, a histogram and a picture, and a text now and then."""

    def step(number: Any, x: Any) -> Any:
        values = {"train/loss": x, "train/norm": 2 * x, "val/loss": 3 * x, "val/norm": 4 * x, "rate": rate}
        weights = hcb.histogram(jnp.linspace(-1, 1, 64) * x)
        picture = hcb.image(jnp.full((8, 8), number / STEPS))
        hcb.metrics(values | {"weights": weights, "sample": picture}, step=number)
        return x * (1 - rate)

    return jax.lax.fori_loop(0, STEPS, step, jnp.float32(1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two runs, whose configurations differ in the rate."""
    folder = tmp_path_factory.mktemp("runs") / "taps"
    for run, rate in (("slow", 0.05), ("fast", 0.1)):
        recorder = hcb.record(folder, run=run, config={"rate": rate, "width": 64})
        with recorder, hcb.outfeed_receiver(sinks=[recorder]):
            train(jnp.float32(rate)).block_until_ready()
    return folder


def test_the_table_of_runs_sorts_searches_and_measures_by_a_baseline(
    visit: Visit, serve: Any, expect: Any, runs: Path
) -> None:
    page = visit(serve(runs).address, "Runs")
    names = page.locator("#run-table .run-name bdi")
    expect(names).to_have_text(["fast", "slow"])  # the latest first
    expect(page.locator("#run-table .settings")).to_have_text("width64")
    page.get_by_role("button", name="train/loss").click()
    expect(names).to_have_text(["slow", "fast"])
    page.get_by_role("button", name="train/loss").click()
    expect(names).to_have_text(["fast", "slow"])
    losses = page.locator("td[data-label='train/loss']")
    expect(losses.nth(0)).to_have_text(re.compile(r"^0\.016423.*0\.016423 to 1$"))
    page.locator("#run-value").select_option("largest value")
    expect(losses.nth(0).locator("b")).to_have_text("1")
    page.locator("#run-table tr").filter(has_text="slow").get_by_role("button", name="baseline").click()
    expect(page.locator("td[data-label='rate'] .change")).to_have_text("+100 %")
    page.reload()
    expect(page.locator("#run-table tr").filter(has_text="slow").get_by_role("button")).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_label("Find").fill("rate=0.05")
    expect(names).to_have_text(["slow"])
    page.get_by_role("tab", name="Charts").click()
    expect(page.get_by_role("article", name="train/loss")).to_contain_text("baseline")
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator(".config tbody tr")).to_have_text(["rate0.050.1"])
    expect(page.locator("#left")).to_have_value("slow")
    expect(page.locator("#difference-detail .card").filter(has_text="train/loss")).to_contain_text("slow")


def test_cards_stand_in_groups_and_pinned_ones_first(
    visit: Visit, serve: Any, expect: Any, runs: Path
) -> None:
    page = visit(serve(runs).address, "Charts")
    sections = page.locator(".section bdi")
    expect(sections).to_have_text(["train", "val", "Arrays and pictures"])
    page.get_by_role("button", name="val 2").click()
    expect(page.get_by_role("article", name="val/loss")).to_be_hidden()
    page.get_by_role("article", name="train/norm").get_by_role("button", name="Pin").click()
    expect(sections.first).to_have_text("Pinned")
    expect(page.locator("#cards > article").first).to_have_attribute("aria-label", "train/norm")
    page.reload()
    expect(page.locator("#cards > article").first).to_have_attribute("aria-label", "train/norm")
    expect(sections.first).to_have_text("Pinned")
    page.get_by_role("article", name="train/norm").get_by_role("button", name="Pin").click()
    expect(sections.first).to_have_text("train")
    expect(page.locator("#cards > article").first).to_have_attribute("aria-label", "rate")
    page.get_by_label("Zoom all charts together").check()
    for name in ("train/norm", "rate"):
        page.get_by_role("article", name=name, exact=True).locator(".u-over").wait_for()
    page.get_by_role("article", name="train/norm").get_by_role("button", name="Zoom in").click()
    page.get_by_role("article", name="rate", exact=True).get_by_role("button", name="Show all").click()
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)


def test_arrays_of_all_runs_share_a_card(visit: Visit, serve: Any, expect: Any, runs: Path) -> None:
    page = visit(serve(runs).address, "Charts")
    histograms = page.get_by_role("article", name="weights")
    histograms.scroll_into_view_if_needed()
    expect(histograms.locator(".part canvas")).to_have_count(2)
    card = page.get_by_role("article", name="sample")
    strips = card.locator(".strip-of-pictures")
    expect(strips).to_have_count(2)
    expect(strips.first.get_by_role("button")).to_have_count(8)
    strips.first.get_by_role("button", name="step 0").click()
    expect(card.locator(".slider output")).to_have_text("step 0 · message 1 of 40")


MANY = 70


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of many short runs."""
    folder = tmp_path_factory.mktemp("many") / "taps"

    @jax.jit
    def step(number: Any, loss: Any) -> None:
        hcb.metrics({"loss": loss, "weights": hcb.histogram(jnp.linspace(-1, 1, 64) * loss)}, step=number)

    for run in range(MANY):
        recorder = hcb.record(folder, run=f"run-{run}")
        with recorder, hcb.outfeed_receiver(sinks=[recorder]):
            for number in range(3):
                step(jnp.int32(number), jnp.float32(run + number))
            hcb.barrier_wait()
    return folder


@pytest.mark.parametrize("width", [1280, 390])
def test_of_many_runs_a_card_names_some_and_counts_the_others(
    visit: Visit, serve: Any, expect: Any, many: Path, width: int
) -> None:
    page = visit(serve(many).address, "Charts", viewport={"width": width, "height": 900})
    card = page.get_by_role("article", name="loss")
    card.locator(".u-over").wait_for()
    expect(card.locator(".legend-item")).to_have_count(12)
    expect(card.locator(".legend")).to_contain_text(f"and {MANY - 12} more")
    box = card.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 4)
    expect(card.locator(".tip-row")).to_have_count(8)
    expect(card.locator(".tip")).to_contain_text(f"and {MANY - 8} more")
    expect(card.locator(".tip-name").first).to_have_text(f"run-{MANY - 1}")  # the highest
    card.get_by_label("More").click()
    with page.expect_download() as download:
        card.get_by_role("button", name="Download CSV").click()
    assert len(download.value.path().read_text().splitlines()) == 1 + 3 * MANY
    histograms = page.get_by_role("article", name="weights")
    histograms.scroll_into_view_if_needed()
    expect(histograms.locator(".part canvas")).to_have_count(8)
    expect(histograms.locator(".legend")).to_contain_text(f"and {MANY - 8} more")
    page.get_by_role("button", name=f"and {MANY - 12} more").click()
    expect(page.locator("#run-table tbody tr")).to_have_count(MANY)
    label = "getComputedStyle(document.querySelector('#run-table td.number'), '::before').textAlign"
    assert page.evaluate(label) == ("left" if width < 640 else "right")
    assert page.locator("#runs").bounding_box()["height"] < 80
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_card_saves_its_data_and_its_picture(visit: Visit, serve: Any, runs: Path, tmp_path: Path) -> None:
    page = visit(serve(runs).address, "Charts")
    card = page.get_by_role("article", name="train/loss")
    card.locator(".u-over").wait_for()

    def saved(what: str) -> bytes:
        card.get_by_label("More").click()
        with page.expect_download() as download:
            card.get_by_role("button", name=f"Download {what}").click()
        assert download.value.suggested_filename == f"train-loss.{what.lower()}"
        download.value.save_as(tmp_path / what)
        return (tmp_path / what).read_bytes()

    head, *rows = csv.reader(saved("CSV").decode().splitlines())
    assert head == ["run", "step", "mean", "min", "max"]
    assert [row[:3] for row in rows if row[1] == "0"] == [["slow", "0", "1"], ["fast", "0", "1"]]
    assert len(rows) == 2 * STEPS
    assert saved("PNG").startswith(b"\x89PNG")
    svg = saved("SVG").decode()
    assert svg.count("<polyline") == 2
    assert "train/loss" in svg


def test_a_card_has_its_own_scale_and_smoothing_and_time_can_be_the_axis(
    visit: Visit, serve: Any, expect: Any, runs: Path
) -> None:
    page = visit(serve(runs).address, "Charts")
    card, other = (page.get_by_role("article", name=name) for name in ("train/loss", "train/norm"))
    for each in (card, other):
        each.locator(".u-over").wait_for()
    card.get_by_label("More").click()
    card.get_by_label("Log scale").check()
    card.get_by_label("Smoothing").fill("0.9")
    assert not page.locator("#log").is_checked()
    expect(page.locator("#smooth-value")).to_have_text("0.00")
    page.locator("#filter").focus()  # closes the menu
    for each, has_raw in ((card, True), (other, False)):
        each.get_by_role("application").focus()
        page.keyboard.press("ArrowRight")
        expect(each.locator(".tip-row")).to_have_count(2)
        assert all((", raw " in row) is has_raw for row in each.locator(".tip-row").all_inner_texts())
    with page.expect_response(lambda answer: "axis=elapsed" in answer.url) as asked:
        page.locator("#axis").select_option("time since the start")
    assert all(0 <= series["first"] < 60 for series in asked.value.json()["series"])
    with page.expect_response(lambda answer: "axis=time" in answer.url) as asked:
        page.locator("#axis").select_option("time of day")
    assert all(time.time() - 3600 < series["first"] < time.time() for series in asked.value.json()["series"])
    card.get_by_role("application").focus()
    told = card.locator(".tip-head")
    for _ in range(200):  # until the answer is drawn
        page.keyboard.press("ArrowLeft")
        if re.search(r"\d\d:\d\d:\d\d$", str(told.text_content())):
            break
        page.wait_for_timeout(50)
    expect(told).to_have_text(re.compile(r"\d\d:\d\d:\d\d$"))
    page.get_by_role("tab", name="Devices").click()
    expect(page.locator(".pill")).to_have_text(["ended", "ended"])
