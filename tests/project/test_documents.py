"""What documents name exists: files, headings, modules, tests; and the README's claims link to their proof."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import ROOT
from hostcallback.receiver.cli.parser import COMMANDS
from python_process import python_output
from tools.documents import rooms

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORTENED = [ROOT, ROOT / "hostcallback", ROOT / "receiver", ROOT / "docs"]
"""Folders from which documents name files."""
FOR_DEVELOPERS = [ROOT / "docs" / "architecture.md", ROOT / "docs" / "contributing.md"]
FOR_DEVELOPERS += sorted((ROOT / "docs" / "design").glob("*.md"))
FOREIGN = {"ExecutionStreamEventMap", "last_collective_launch_event", "PjitFunction", "roofline"}
"""Names of XLA and JAX in the documents for developers."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).resolve().exists()
    ]
    assert missing == []


def anchors(document: Path) -> set[str]:
    """The ids that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_heading_leads_to_one(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text())
    missing = [
        f"{path}#{anchor}"
        for path, anchor in links
        if anchor not in anchors((document.parent / path).resolve() if path else document)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_source_file_that_a_document_names_exists(document: Path) -> None:
    named = re.findall(r"`([\w./]+/[\w./]+\.(?:py|cc|h))`", document.read_text())
    missing = [name for name in named if not any((folder / name).exists() for folder in SHORTENED)]
    assert missing == []


def sources() -> Iterator[Path]:
    """The source files, without vendored ones, a test that plants paths, and what names tests of other projects."""
    for folder in ("hostcallback", "tests", "tools", "examples"):
        for path in (ROOT / folder).rglob("*"):
            vendored = {"third_party", "__pycache__"}.intersection(path.parts)
            names_foreign_files = path.match("tools/upstream/*.py")
            planted = path.name == "test_lint_project.py"
            if path.suffix in (".py", ".cc", ".h") and not (vendored or planted or names_foreign_files):
                yield path


def test_every_file_that_a_source_file_names_exists() -> None:
    named = re.compile(
        r"(?<![\w/.-])((?:docs|tests|tools|receiver|hostcallback|examples)/[\w./]+\.(?:md|py|cc|h))\b"
    )
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert missing == set()


@pytest.mark.parametrize("document", FOR_DEVELOPERS, ids=lambda path: path.name)
def test_every_name_in_a_document_for_developers_occurs_in_the_sources(
    document: Path, words: set[str]
) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]+)`", document.read_text()))
    assert set(re.findall(r"[A-Za-z_]\w{2,}", quoted)) - words - FOREIGN == set()


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Every word in the sources, and every file's name."""
    found = {path.stem for path in sources()}
    for path in [*sources(), ROOT / "setup.cfg", ROOT / "pyproject.toml", ROOT / "Makefile"]:
        found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


def test_every_recipe_names_tests_that_exist() -> None:
    recipes = re.findall(
        r"make quick ROOM=([\w./]+)(?: K=(\w+))?", (ROOT / "docs" / "contributing.md").read_text()
    )
    assert len(recipes) > 10
    for room, keyword in recipes:
        path = ROOT / "tests" / room
        assert path.exists(), room
        tests = [path] if path.is_file() else path.rglob("test_*.py")
        assert not keyword or any(keyword in test.read_text() for test in tests), (room, keyword)


def test_every_entry_of_ours_in_the_feature_table_is_linked_to_a_test() -> None:
    readme = (ROOT / "README.md").read_text().split("## How it compares")[1].split("\n## ")[0]
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert len(features_in(page, r"\]\((\.\./tests/|benchmarks\.md)")) >= 15
    short = features_in(readme, r"\]\((tests|docs)/")
    assert len(short) == 8
    assert set(short) <= set(features_in(page, ""))


def features_in(text: str, link: str) -> list[str]:
    """The features of a table of comparison. Each row has all entries, and ours has the link."""
    head, *features = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert head[:2] == ["", "hostcallback"]
    for row in features:
        assert len(row) == len(head), row
        assert re.search(link, row[1]), row
    return [row[0] for row in features]


def test_the_readme_is_short_and_shows_the_demo() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", "\n".join(lines[:40]))
    assert (ROOT / picture).stat().st_size < 200_000


def test_the_tables_of_rooms_are_those_of_the_docstrings() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert rooms.documented(text) == text, "run python tools/documents/rooms.py"


@pytest.mark.parametrize("package", rooms.PACKAGES)
def test_every_room_is_in_the_tables(package: str) -> None:
    folder = ROOT.joinpath(*package.split("."))
    found = set(folder.glob("[!_]*.py")) | {path.parent for path in folder.glob("*/__init__.py")}
    assert found <= {*rooms.rooms(package)}, "the layers in pyproject.toml have all rooms"


@pytest.mark.slow
def test_no_more_files_run_for_a_message_than_the_document_says() -> None:
    pytest.importorskip("httpx", reason="the page needs hostcallback[ui]")
    program = "from tools.documents import files_run as f; print({k: len(v) for k, v in f.measure().items()})"
    printed = python_output("-c", program, cwd=ROOT)
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for what, count in ast.literal_eval(printed.splitlines()[-1]).items():
        (stated,) = re.findall(rf"^\| {re.escape(what)} \| (\d+) \|$", text, re.MULTILINE)
        assert count <= int(stated) + 2, f"{what}: run python tools/documents/files_run.py"


def test_every_thread_is_in_the_table_of_threads() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hostcallback").rglob("*.py"))
    names = set(re.findall(r'\bname=f?"(hostcallback-[a-z-]*)', sources))
    table = (ROOT / "docs" / "design" / "threads.md").read_text()
    assert len(names) > 15
    assert {name for name in names if f"`{name}" not in table} == set()


def test_every_command_is_in_the_table_of_commands() -> None:
    table = (ROOT / "docs" / "command-line.md").read_text().partition("## ")[0]
    assert {name for name in COMMANDS if f"`{name}`" not in table} == set()
