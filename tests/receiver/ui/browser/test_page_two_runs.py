"""Charts of two runs of different length: the tooltip, the labels of a log scale, and a histogram in Compare."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]
SHORT, LONG = 20, 40

WATCH_LABELS = """
    const fill = CanvasRenderingContext2D.prototype.fillText;
    window.labels = [];
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
        const box = this.measureText(text);
        const at = this.getTransform().transformPoint(new DOMPoint(x, y));
        const ends = [at.x - box.actualBoundingBoxLeft, at.x + box.actualBoundingBoxRight];
        window.labels.push([text, ...ends, this.canvas.width]);
        return fill.call(this, text, x, y, ...more);
    };
"""
"""Keeps each text that a canvas draws, with its left and right end and the canvas's width, in pixels of the canvas."""

COLORS = """(canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of two runs with a number of many magnitudes, and a histogram."""
    folder = tmp_path_factory.mktemp("runs") / "taps"

    @jax.jit
    def step(number: Any, scale: Any) -> None:
        tiny = 1.2345 * 10.0 ** (number - 30.0)
        hcb.metrics({"tiny": tiny}, step=number)
        hcb.metrics({"weights": hcb.histogram(scale * jnp.linspace(-1, 1, 64))}, step=number, name="weights")

    for run, steps in (("short", SHORT), ("long", LONG)):
        recorder = hcb.record(folder, run=run)
        with recorder, hcb.outfeed_receiver(sinks=[recorder]):
            for number in range(steps):
                step(jnp.int32(number), jnp.float32(steps))
            hcb.barrier_wait()
    return folder


def test_a_run_that_has_ended_is_not_in_the_tooltip(
    visit: Visit, serve: Any, expect: Any, runs: Path
) -> None:
    page = visit(serve(runs).address, "Charts")
    card = page.get_by_role("article", name="tiny")
    plot = card.locator(".u-over")
    plot.wait_for()
    width = plot.bounding_box()["width"]
    names = card.locator(".tip .tip-name")
    for share, shown in ((0.25, ["short", "long"]), (0.75, ["long"])):
        plot.hover(position={"x": share * width, "y": 40})
        expect(names).to_have_text(shown)


@pytest.mark.parametrize("width", [1280, 390])
def test_labels_of_a_log_scale_are_not_cut(visit: Visit, serve: Any, runs: Path, width: int) -> None:
    page = visit(
        serve(runs).address,
        "Charts",
        viewport={"width": width, "height": 800},
        prepare=lambda page: page.add_init_script(WATCH_LABELS),
    )
    page.get_by_role("article", name="tiny").locator(".u-over").wait_for()
    page.evaluate("window.labels.length = 0")
    page.locator("#log").check()
    page.wait_for_timeout(500)
    labels = page.evaluate("window.labels")
    assert len([text for text, *_ in labels if re.match("1e\u2212[12]\\d$", text)]) >= 2, labels
    assert [label for label in labels if label[1] < 0 or label[2] > label[3]] == []


def test_a_histogram_chosen_in_compare_draws_both_runs(
    visit: Visit, serve: Any, expect: Any, runs: Path
) -> None:
    page = visit(serve(runs).address, "Compare")
    page.locator(".strip-button", has_text="weights").click()
    drawn = page.locator("#difference-detail .card", has_text="weights").locator(".part canvas")
    expect(drawn).to_have_count(2)
    page.wait_for_timeout(300)
    assert all(drawn.nth(number).evaluate(COLORS) > 2 for number in range(2))


def test_a_difference_of_shapes_has_both_and_labels_of_small_numbers_are_not_cut(
    visit: Visit, serve: Any, expect: Any, tmp_path: Path
) -> None:
    for run, size in (("one", 32), ("two", 64)):
        with hcb.outfeed_receiver(sinks=[hcb.record(tmp_path, run=run)]):
            hcb.metrics({"w": hcb.histogram(jnp.linspace(-5.15e-6, 5.15e-6, size))}, step=0)
    page = visit(serve(tmp_path).address, "Compare", prepare=lambda page: page.add_init_script(WATCH_LABELS))
    verdict = page.locator(".verdict")
    expect(verdict.locator("b")).to_have_text(["step 0", "w"])
    expect(verdict.locator("dd")).to_have_text(["float32[32]", "float32[64]"])
    expect(page.locator("#difference-detail .part canvas")).to_have_count(2)
    page.wait_for_timeout(500)
    labels = [label for label in page.evaluate("window.labels") if "e" in label[0]]
    assert len(labels) >= 8, labels
    assert [label for label in labels if label[1] < 0] == []
    last = page.locator("#difference-detail .part canvas").last.bounding_box()
    assert page.locator("#difference-detail .legend").bounding_box()["y"] >= last["y"] + last["height"]
