"""The documentation site, built by `make docs`, in a browser: what fits, what the search finds, the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_needs import missing
from checkout import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # some hundred pages

SITE = ROOT / "build" / "site"

TOO_WIDE = """() => {
  const over = (element) => element.scrollWidth > element.clientWidth + 1;
  const boxes = '.md-typeset pre, .md-typeset pre > code, .md-typeset__scrollwrap';
  const wide = [...document.querySelectorAll(boxes)].filter(over);
  if (document.documentElement.scrollWidth > window.innerWidth) wide.push(document.body);
  return wide.map((element) => element.textContent.trim().slice(0, 60));
}"""

WRAPPED = """() => [...document.querySelectorAll('.md-typeset pre > code')].filter((code) => {
  const line = parseFloat(getComputedStyle(code).lineHeight);
  const pad = parseFloat(getComputedStyle(code).paddingTop) * 2;
  const lines = code.textContent.replace(/\\n$/, '').split('\\n');
  return lines.every((text) => text.length <= 110) && code.clientHeight > (lines.length + 0.6) * line + pad;
}).map((code) => code.textContent.slice(0, 60))"""

FOUND_FIRST = {
    "checks": "checks.html",
    "progress bar": "progress.html",
    "metrics": "metrics.html",
    "NaN": "checks.html",
    "browser": "ui.html",
    "two runs differ": "diff.html",
    "capsule": "capsules.html",
    "flight recorder": "flight-recorder.html",
    "record": "tap-log.html",
    "collector": "forwarding.html",
    "notebook": "notebooks.html",
    "data frame": "data.html",
}


def built() -> list[Path]:
    """The pages of the site."""
    if not (SITE / "gallery" / "checks.html").exists():
        missing("the site is not built (make docs)")
    pages = [page for page in sorted(SITE.rglob("*.html")) if page.name != "404.html"]
    # The pages of source files are alike: that with the longest name stands for all.
    sources = [page for page in pages if page.is_relative_to(SITE / "source")]
    longest = max(sources, key=lambda page: len(page.name))
    return [page for page in pages if page not in sources or page == longest]


@pytest.fixture
def window(chromium: Any) -> Iterator[Any]:
    """Opens windows of a width and a color scheme."""
    contexts = []

    def opened(width: int, scheme: str = "light", height: int = 900) -> Any:
        contexts.append(
            chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        )
        return contexts[-1].new_page()

    yield opened
    for context in contexts:
        context.close()


def test_nothing_is_wider_than_its_column_and_every_picture_is_there(window: Any) -> None:
    page = window(1400)
    wide, wrapped, lost = {}, {}, {}
    for file in built():
        name = str(file.relative_to(SITE))
        page.set_viewport_size({"width": 1400, "height": 900})
        page.goto(file.as_uri())
        wide[name] = page.evaluate(TOO_WIDE)
        if "source/" not in name:
            wrapped[name] = page.evaluate(WRAPPED)
        page.wait_for_function("[...document.images].every((image) => image.complete)")
        lost[name] = page.evaluate(
            "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
        )
        page.set_viewport_size({"width": 390, "height": 900})
        wide[f"{name}, 390 px"] = page.evaluate(TOO_WIDE)
    assert len(lost) > 80
    for found in (wide, wrapped, lost):
        assert {name: texts for name, texts in found.items() if texts} == {}


def test_the_first_screen_has_the_sentence_the_program_its_output_and_how_to_install(window: Any) -> None:
    built()
    page = window(1400)
    page.goto((SITE / "index.html").as_uri())
    for shown in (
        "h1",
        ".hero .highlight:has-text('watch_nonfinite')",
        ".hero img",
        ".hero :text('pip install')",
    ):
        box = page.locator(shown).first.bounding_box()
        assert box, shown
        assert box["y"] + box["height"] <= 900, shown
    code = page.locator(".hero .highlight").first.bounding_box()
    picture = page.locator(".hero img").first.bounding_box()
    assert picture["x"] > code["x"] + code["width"]  # next to each other
    assert page.locator(".md-logo img").first.evaluate("(image) => image.naturalWidth") > 0
    page.goto((SITE / "checks.html").as_uri())
    assert (
        page.locator(".md-footer__link--prev").count() == page.locator(".md-footer__link--next").count() == 1
    )


def test_every_card_of_the_gallery_has_a_picture(window: Any) -> None:
    built()
    page = window(1400)
    page.goto((SITE / "gallery" / "index.html").as_uri())
    cards = page.locator(".grid.cards > ul > li")
    assert cards.count() >= 13
    assert cards.count() == page.locator(".grid.cards > ul > li img").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "count"), [("story", 2), ("ui", 6)])
def test_dark_mode_has_dark_pictures(window: Any, name: str, count: int, scheme: str) -> None:
    built()
    page = window(1400, scheme)
    page.goto((SITE / f"{name}.html").as_uri())
    shown = page.locator("article img:visible").evaluate_all("(all) => all.map((image) => image.src)")
    assert len(shown) == count
    assert [source for source in shown if ("-dark.png" in source) != (scheme == "dark")] == []


def test_the_search_finds_the_guide_before_the_design_note(window: Any) -> None:
    built()
    page = window(1400)
    page.goto((SITE / "index.html").as_uri())
    first = {}
    for query in FOUND_FIRST:
        field = page.locator("input[name=query]")
        field.focus()
        field.fill(query)
        field.dispatch_event("keyup")
        page.wait_for_timeout(1500)
        link = page.locator(".md-search-result__link").first
        first[query] = (
            (link.get_attribute("href") or "").rpartition("/")[2].partition("?")[0].partition("#")[0]
        )
    assert first == FOUND_FIRST
