"""The times of places on the page: columns, the table, the slowest steps and their links, in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb
from transforming import nap

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]
STEPS = 60


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a training with places, a metric and a text."""
    folder = tmp_path_factory.mktemp("timed") / "taps"

    def step(x: Any, number: Any) -> Any:
        hcb.metrics({"loss": jnp.sum(x)}, step=number)
        hcb.print("step {n}", n=number)
        for name in ("attention", "mlp"):
            with hcb.span(name):
                x = jnp.tanh(x @ x)
        return x

    train = jax.jit(step)
    with hcb.outfeed_receiver(record=folder), hcb.observe(what="time", name="parts"):
        x = jnp.eye(64)
        for number in range(STEPS):
            x = train(x, number)
    return folder


def test_the_time_of_places_is_shown_and_leads_to_what_else_was_logged(
    visit: Visit, serve: Any, expect: Any, timed: Path
) -> None:
    page = visit(serve(timed).address, "Time")
    rows = page.locator("#time-places tbody tr")
    expect(rows.locator("th")).to_have_text(["attention", "mlp", "program"])
    expect(rows.first.locator("td[data-label='Count']")).to_have_text(str(STEPS))
    expect(rows.last.locator("td[data-label='Share']")).to_have_text("100 %")
    plot = page.locator("#time-plot .u-over")
    plot.hover(position={"x": 10, "y": 50})
    expect(page.locator("#time-plot .tip")).to_contain_text(re.compile(r"step \d+, .*mlp .*attention .* %"))
    page.locator("#time-unit").select_option("milliseconds")
    slow = page.locator("#time-slowest tbody tr").first
    step = int(slow.locator("th").inner_text().removeprefix("step "))
    slow.get_by_role("button", name="texts").click()
    expect(page.locator("#text-list .text-body").filter(has_text=f"step {step}").first).to_be_visible()
    expect(page.locator("#text-from")).to_have_value(str(step))
    page.get_by_role("tab", name="Time").click()
    slow.get_by_role("button", name="charts").click()
    card = page.get_by_role("article", name="loss")
    expect(card.get_by_role("button", name="Show all")).to_be_visible()


def test_without_times_the_page_says_how_to_measure_some(
    visit: Visit, serve: Any, expect: Any, log: Path
) -> None:
    page = visit(serve(log).address, "Time")
    expect(page.locator("#panel-time .empty")).to_contain_text('hcb.observe(where="layers/*", what="time")')
    expect(page.locator("#time-found")).to_be_hidden()


def test_slow_places_have_room_on_a_narrow_page(
    visit: Visit, serve: Any, expect: Any, tmp_path: Path
) -> None:
    def step(x: Any, number: Any) -> Any:
        hcb.metrics({"loss": jnp.sum(x)}, step=number)
        for name in ("attention of the decoder", "mlp"):
            with hcb.span(name):
                x = nap(x, jnp.where(number == 7, 0.3, 0.001))
        return x

    train = jax.jit(step)
    with hcb.outfeed_receiver(record=tmp_path), hcb.observe(what="time", name="parts"):
        for number in range(12):
            train(jnp.ones(4), number)
    page = visit(serve(tmp_path).address, "Time", viewport={"width": 390, "height": 800})
    cell = page.locator("#time-slowest tbody tr").first.locator("td[data-label='Far above its median']")
    expect(cell).to_contain_text(re.compile(r"(?=.*attention of the decoder .* ms \()(?=.*mlp .* ms \()"))
    assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth && cell.clientHeight < 120")


@pytest.mark.parametrize("width", [360, 390, 641])
def test_all_tabs_fit_with_errors_and_times(
    visit: Visit, serve: Any, expect: Any, log: Path, timed: Path, width: int
) -> None:
    page = visit(serve(log, timed).address, "Time", viewport={"width": width, "height": 760})
    expect(page.locator("#error-count")).to_have_text("1")
    page.locator("#time-places tbody tr").first.wait_for()
    bar, last = page.get_by_role("tablist"), page.get_by_role("tab", name="Control")
    for errors in ("1", "99"):
        page.locator("#error-count").evaluate("(badge, text) => { badge.textContent = text; }", errors)
        assert bar.evaluate("(bar) => bar.scrollWidth <= bar.clientWidth")
        box = last.bounding_box()
        assert box["x"] + box["width"] <= width
