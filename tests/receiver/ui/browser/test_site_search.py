"""The search of the documentation site finds hostile titles and takes hostile words: they stay text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser_needs import missing
from checkout import ROOT
from tools.website.__main__ import finish

pytestmark = pytest.mark.slow

TITLES = (
    "plainword",
    "<img src=x onerror=globalThis.broken=1> imagetitle",
    "</script><script>globalThis.broken=1</script> scripttitle",
    "\"'><svg onload=globalThis.broken=1> quotetitle",
    "constructor __proto__ protoword",
    "\u202egnp.exe bidiword",
    "long" + "w" * 4_000,
)

# Left out: "plain~999999999", which asks lunr for all words at that distance. Its own tab runs out of memory.
QUERIES = (
    "<img src=x onerror=globalThis.broken=1>",
    "imagetitle",
    "scripttitle",
    "quotetitle",
    "</script><script>globalThis.broken=1</script>",
    "__proto__",
    "constructor",
    "bidiword",
    "\u202eplain",
    '"',
    "*",
    "title:*",
    "nofield:x",
    "plain~2",
    "plain^1e99 +",
    "-",
    ":" * 500,
    "((((((",
    "w" * 20_000,
    "a* " * 500,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with the theme, the plugins and the search of ours, and hostile pages."""
    if subprocess.run([sys.executable, "-c", "import mkdocs, material"], capture_output=True).returncode:
        missing("MkDocs is not installed (pip install 'hostcallback[docs]')")
    folder = tmp_path_factory.mktemp("site")
    pages = folder / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("# start\n\nplainword\n")
    for number, title in enumerate(TITLES):
        escaped = title.replace("&", "&amp;").replace("<", "&lt;")
        (pages / f"page{number}.md").write_text(f"# {escaped}\n\n`{title}` in code\n\n## {escaped} again\n")
    names = ["index.md", *(f"page{number}.md" for number in range(len(TITLES)))]
    nav = [{TITLES[0] if number == 0 else f"entry {number}": name} for number, name in enumerate(names)]
    configuration = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "pages",
        "site_dir": str(folder / "built"),
        "nav": nav,
        "plugins": {"offline": {}, "search": {}},
    }
    (folder / "mkdocs.yml").write_text(json.dumps(configuration), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", "mkdocs.yml"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    finish(folder / "built")
    return folder / "built"


def type_into(field: Any, text: str) -> None:
    """Puts a text into the field at once, and lets go of a key: the theme looks at its text then."""
    field.focus()
    field.fill(text)
    field.dispatch_event("keyup")


def test_hostile_words_and_titles_stay_text(chromium: Any, site: Path) -> None:
    page = chromium.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto((site / "index.html").as_uri())
    found: dict[str, str] = {}
    field = page.locator("input[name=query]")
    for query in (*QUERIES, "plainword"):
        type_into(field, "plainword")
        page.wait_for_function("document.querySelectorAll('.md-search-result__item').length >= 2")
        type_into(field, query)
        page.wait_for_timeout(400)  # without results nothing may appear
        found[query] = page.locator(".md-search-result").inner_text()
    assert problems == []
    assert page.evaluate("globalThis.broken") is None
    assert (
        page.locator(".md-search-result img, .md-search-result script, .md-search-result svg[onload]").count()
        == 0
    )
    assert "<img src=x onerror=globalThis.broken=1> imagetitle" in found["imagetitle"]
    assert "</script><script>globalThis.broken=1</script> scripttitle" in found["scripttitle"]
    assert "start" in found["plainword"]  # the search still answers
