"""The documentation site: every page is in the navigation, the gallery's examples run, charts show the table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT

sys.path.insert(0, str(ROOT))

from tools.bench import charts
from tools.documents import costs as document_costs
from tools.website import gallery, home, pages, reference, tables, terminal

SHOWS = {
    "checks": ("a row sums to 0.0",),
    "time_of_parts": ("\nlayers/0 ", "\nbackward layers/2 ", "100.0 %"),
    "nan_hunt": ("1 infinite values",),
    "failure_capsule": (
        "reproduced: nonfinite exp at failure_capsule.py:31 (loss_fn)\nexit status 0",
        "the first operation that differs: exp [32] at failure_capsule.py:31 (loss_fn)",
    ),
}
"""Texts that the cheap examples print; the first example is in the fast tests."""


def leaves(entries: Any) -> Iterator[str]:
    """The files of a navigation."""
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from leaves(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    found = list(leaves(pages.navigation()))
    assert len(found) == len(set(found))
    docs = ROOT / "docs"
    assert {str(path.relative_to(docs)) for path in docs.rglob("*.md")} <= set(found)


def test_guides_are_in_groups_under_what_the_reader_wants() -> None:
    named = [name for members in pages.GUIDES.values() for name in members]
    assert all((ROOT / "docs" / f"{name}.md").exists() for name in named)
    assert "More" not in pages.guides(), "name the new page in GUIDES or SECTIONS of tools/website/pages.py"
    overview = pages.overview()
    assert "- **[Find where two runs differ](diff.md)**: " in overview
    assert all(f"]({name}.md)" in overview for name in named)


def test_links_to_tests_lead_to_a_page_with_the_test(tmp_path: Path) -> None:
    pages.stage(tmp_path)
    links = re.findall(r"\]\((source/tests/[\w/.]+)\)", (tmp_path / "comparison.md").read_text())
    assert len(links) > 20
    assert "`tests/" not in (tmp_path / "comparison.md").read_text()
    shown = (tmp_path / links[0]).read_text()
    assert "exclude: true" in shown
    assert (ROOT / links[0].removeprefix("source/").removesuffix(".md")).read_text().rstrip() in shown


def test_a_picture_with_a_dark_one_beside_it_is_shown_as_either(tmp_path: Path) -> None:
    (tmp_path / "a-dark.png").touch()
    page = pages.with_dark_pictures("![A](a.png) ![B](b.png)", tmp_path)
    assert page == "![A](a.png#only-light)![A](a-dark.png#only-dark) ![B](b.png)"
    page = pages.with_dark_pictures('<img src="a.png" alt="A" width="300">\n', tmp_path)
    assert page.splitlines() == [
        '<img src="a.png#only-light" alt="A" width="300"><img src="a-dark.png#only-dark" alt="A" width="300">'
    ]


def test_pictures_of_the_page_are_light_and_dark() -> None:
    texts = ((pages.DOCS / name).read_text(encoding="utf-8") for name in ("ui.md", "notebooks.md"))
    shown = set(re.findall(r"images/([\w-]+)\.png", "".join(texts)))
    assert len(shown) >= 7
    for name in shown:
        assert (pages.DOCS / "images" / f"{name}-dark.png").exists(), name


def test_pages_link_to_no_file_that_the_site_lacks(tmp_path: Path) -> None:
    pages.stage(tmp_path)
    (tmp_path / "index.md").write_text(home.text(tmp_path))
    for page in tmp_path.rglob("*.md"):
        if "source" in page.relative_to(tmp_path).parts:
            continue  # the files that pages link to
        links = re.findall(
            r"(?<!`)\]\(([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        )
        made = ("assets/", "gallery/", "reference/")  # by the other parts of the build
        missing = [
            link
            for link in links
            if "://" not in link and not link.startswith(made) and not (page.parent / link).exists()
        ]
        assert missing == [], page.name


def test_the_reference_has_every_public_name_once() -> None:
    import hostcallback

    names = reference.public_names(ROOT / "hostcallback")
    assert sorted(names) == sorted([*hostcallback.__all__, *hostcallback._NAMED_AS_BUILTINS])
    placed = [name for section in reference.SECTIONS.values() for name in section]
    assert len(placed) == len(set(placed))
    assert set(placed) <= set(names)


def test_examples_in_docstrings_are_code_on_the_site() -> None:
    source = (ROOT / "hostcallback" / "api" / "tap.py").read_text(encoding="utf-8")
    fenced = reference.with_fenced_examples(source)
    assert fenced.count("```python\n") == source.count("Example:\n") > 0
    assert (
        '        ```python\n        x = hcb.id_print(x, what="activations")\n        ```\n    """\n' in fenced
    )


def test_the_gallery_has_at_least_thirteen_examples_with_title_text_and_code() -> None:
    scripts = gallery.examples()
    assert len(scripts) >= 13
    for script in scripts:
        title, text = gallery.page(script, gallery.Result("printed", []), ["picture.png"])
        assert len(title) < 60
        assert len(script.read_text().splitlines()) <= 80, script.name
        assert f"![{title}](picture.png)" in text
        assert "import hostcallback as hcb" in text
        assert text.endswith("It prints:\n\n```text\nprinted\n```\n")


@pytest.mark.slow_variants
@pytest.mark.parametrize("name", SHOWS)
def test_a_cheap_example_of_the_gallery_runs(name: str, tmp_path: Path) -> None:
    (script,) = gallery.EXAMPLES.rglob(f"{name}.py")
    result = gallery.execute(script, tmp_path)
    for text in SHOWS[name]:
        assert text in result.output
    assert str(tmp_path) not in result.output


def test_an_example_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text("print('before')\nraise ValueError('it broke')\n")
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(gallery.ExampleError, match=r"(?s)failing\.py ended with status 1:\nbefore.*it broke"):
        gallery.execute(script, folder)


@pytest.mark.slow
def test_all_examples_run_and_each_that_fails_is_named(tmp_path: Path) -> None:
    scripts = []
    for name, code in (
        ("first", "raise ValueError('it broke')"),
        ("second", "print('fine')"),
        ("third", "1 / 0"),
        ("slow", "print('so far'); import time; time.sleep(600)"),
    ):
        script = tmp_path / f"{name}.py"
        script.write_text(f'"""The {name} one.\n\nIt runs.\n"""\n\n{code}\n')
        scripts.append(script)
    with pytest.raises(gallery.ExampleError) as raised:
        gallery.stage(tmp_path / "gallery", scripts, timeout_sec=10)
    assert re.search(
        r"(?s)first\.py ended with status 1:.*it broke.*third\.py ended.*ZeroDiv", str(raised.value)
    )
    second, slow = ((tmp_path / "gallery" / f"{name}.md").read_text() for name in ("second", "slow"))
    assert "It prints:\n\n```text\nfine\n```" in second
    assert "so far" in slow
    assert "ended before its end" in slow
    assert ">fine</text>" in (tmp_path / "gallery" / "second-terminal.svg").read_text()
    assert "[![The slow one](slow-terminal.svg)](slow.md)" in (tmp_path / "gallery" / "index.md").read_text()


def test_a_picture_of_a_terminal_wraps_and_escapes() -> None:
    drawn = terminal.picture("$ hcb cat <run>\n" + "word " * 12 + "\n" * 30, columns=30, rows=6)
    assert "$ hcb cat &lt;run&gt;</text>" in drawn
    lines = re.findall(r">([^<>]*)</text>", drawn)
    assert len(lines) == 6
    assert max(map(len, lines)) <= 30
    assert lines[-1] == "..."


@pytest.mark.slow_variants
def test_the_program_of_the_first_screen_prints_what_its_picture_shows() -> None:
    assert len([line for line in home.program().splitlines() if line]) <= 8
    shown = home.printed()
    assert shown.startswith("$ python hunt.py\nloss 1.386\nloss -0.083\nloss -0.362\nloss -inf\nloss inf\n")
    line = home.program().splitlines().index("    loss = jnp.log(w * x)") + 1
    assert f"watched operation log at hunt.py:{line} (step)" in shown
    assert "iteration 3" in shown


def test_cells_of_wide_tables_have_the_titles_of_their_columns() -> None:
    head = "<thead><tr><th></th><th>a &amp; <code>b</code></th><th>c</th><th>d</th></tr></thead>"
    wide = f"<table>{head}<tbody><tr><td>1</td><td style='x'>2</td><td>3</td><td>4</td></tr></tbody></table>"
    shown = tables.labelled(wide)
    assert '<table data-columns="4">' in shown
    assert """<td data-label="">1</td><td data-label="a &amp; b" style='x'>2</td>""" in shown
    narrow = "<table><tr><th>a</th></tr><tr><td>1</td></tr></table>"
    assert tables.labelled(narrow) == narrow


def test_the_charts_show_the_figures_of_the_table() -> None:
    costs = document_costs.read_costs(document_costs.REPORT.read_text(encoding="utf-8"))
    page = document_costs.REPORT.read_text(encoding="utf-8")
    for name in charts.CHARTS:
        drawn = (ROOT / "docs" / "benchmarks" / f"{name}.svg").read_text(encoding="utf-8")
        rows = charts.bars(name, costs)
        assert len(rows) > 5
        missing = [text for _, _, text in rows if f">{text}<" not in drawn]
        assert missing == [], "run python tools/bench.py --charts"
        assert f"(benchmarks/{name}.svg)" in page


@pytest.mark.slow
def test_drawing_the_charts_again_changes_nothing_in_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = tmp_path / "benchmarks.md"
    before = document_costs.REPORT.read_text(encoding="utf-8")
    report.write_text(before, encoding="utf-8")
    charts.redraw(report)
    assert report.read_text(encoding="utf-8") == before
