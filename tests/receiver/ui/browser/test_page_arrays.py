"""What the page shows of images, small arrays and arrays of many numbers, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hostcallback as hcb

pytestmark = pytest.mark.slow

Visit = Callable[..., Any]

PIXEL = """async (img) => {
    await img.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [img.naturalWidth, img.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(img, 0, 0);
    return [canvas.width, canvas.height, ...context.getImageData(5, 2, 1, 1).data];
}"""


@jax.jit
def send(step: Any) -> Any:
    """Sends a picture with one bright pixel, a matrix with a NaN, and a vector."""
    picture = jnp.zeros((6, 8, 3), jnp.uint8).at[2, 5].set(jnp.array([200, 10 * step, 30], jnp.uint8))
    hcb.id_tap(ignore, {"step": step, "pixels": picture}, name="picture")
    matrix = jnp.array([[1.5, jnp.nan, 3.0], [4.0, 5.0, 6.0]]) + step
    hcb.id_tap(ignore, {"step": step, "m": matrix}, name="matrix")
    hcb.id_tap(ignore, {"step": step, "v": jnp.arange(100.0) * step}, name="vector")
    return step + 1


def ignore(value: Any) -> None:
    """A tap function."""


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of four steps of `send`."""
    folder = tmp_path_factory.mktemp("arrays") / "taps"
    with hcb.outfeed_receiver(record=folder):
        step = jnp.int32(0)
        for _ in range(4):
            step = send(step)
        step.block_until_ready()
    return folder


def test_an_image_is_a_picture_of_its_pixels_at_each_step(
    visit: Visit, serve: Any, expect: Any, arrays: Path
) -> None:
    page = visit(serve(arrays).address, "Charts")
    card = page.get_by_role("article", name="picture pixels")
    image = card.locator(".picture img")
    image.wait_for()
    assert image.evaluate(PIXEL) == [8, 6, 200, 30, 30, 255]
    expect(image).to_have_attribute("alt", "picture, uint8[6, 8, 3], as a picture")
    expect(card).to_contain_text("step 3 · message 4 of 4")
    slider = card.get_by_role("slider", name="message")
    slider.press("ArrowLeft")
    expect(card.locator(".slider output")).to_have_text("step 2 · message 3 of 4")
    assert image.evaluate(PIXEL) == [8, 6, 200, 20, 30, 255]
    slider.press("Home")
    expect(card.locator(".slider output")).to_have_text("step 0 · message 1 of 4")
    assert image.evaluate(PIXEL) == [8, 6, 200, 0, 30, 255]


def test_a_small_array_is_a_table_with_statistics(
    visit: Visit, serve: Any, expect: Any, arrays: Path
) -> None:
    page = visit(serve(arrays).address, "Charts")
    card = page.get_by_role("article", name="matrix m")
    table = card.get_by_role("region", name="values of matrix")
    rows = table.locator("tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0).locator("td")).to_have_text(["4.5", "NaN", "6"])
    expect(rows.nth(1).locator("td")).to_have_text(["7", "8", "9"])
    expect(table.locator("td.bad")).to_have_text("NaN")
    stats = dict(zip(*(card.locator(f".stats {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert stats | {"type": "float32[2, 3]", "min": "4.5", "max": "9", "not finite": "1"} == stats
    card.get_by_role("slider", name="message").press("Home")
    expect(rows.nth(0).locator("td").first).to_have_text("1.5")


def test_a_vector_is_a_heat_map_over_the_steps(visit: Visit, serve: Any, expect: Any, arrays: Path) -> None:
    page = visit(serve(arrays).address, "Charts")
    card = page.get_by_role("article", name="vector v")
    card.locator("canvas").first.wait_for()
    chart = card.get_by_role("application")
    chart.focus()
    chart.press("ArrowRight")
    expect(card.locator(".tip")).to_contain_text("step")


@jax.jit
def rotate(step: Any) -> Any:
    """Sends a complex number, and an array of two."""
    hcb.tap(ignore, jax.lax.complex(3.0, 4.0) * step, name="number")
    hcb.tap(ignore, jnp.array([19 + 38j, 57 - 76j]) / step, name="pair")
    return step + 1


def test_complex_numbers_have_both_parts_in_tables_and_their_magnitude_in_charts(
    visit: Visit, serve: Any, expect: Any, tmp_path: Path
) -> None:
    with hcb.outfeed_receiver(record=tmp_path / "taps"):
        rotate(rotate(jnp.float32(1)))
    page = visit(serve(tmp_path / "taps").address, "Charts")
    pair = page.get_by_role("article", name="pair")
    expect(pair.locator("td")).to_have_text(["9.5+19j", "28.5\N{MINUS SIGN}38j"])
    expect(pair.locator(".stats")).to_contain_text("47.5")
    expect(pair.locator(".card-note")).to_have_text("The statistics are of the magnitudes.")
    number = page.get_by_role("article", name="number")
    expect(number.locator(".card-note")).to_have_text("Magnitudes of complex numbers.")
    expect(number.locator(".legend b")).to_have_text("10")
    pair.locator("summary").click()
    with page.expect_download() as saved:
        pair.get_by_role("button", name="Download CSV").click()
    assert saved.value.path().read_text().splitlines()[1].endswith(",0,9.5+19j")
