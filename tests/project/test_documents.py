"""The documents' links have targets, and the claims about this package in the README's table link to their proof."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkout import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORTENED = [ROOT, ROOT / "hostcallback", ROOT / "receiver", ROOT / "docs"]
"""Folders from which documents name files."""


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


def test_every_entry_of_ours_in_the_feature_table_is_linked_to_a_test() -> None:
    section = (ROOT / "README.md").read_text().split("## How it compares")[1].split("\n## ")[0]
    head, *features = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line.startswith("| ")
    ]
    assert head[:2] == ["", "hostcallback"]
    assert len(features) >= 15
    for row in features:
        assert len(row) == len(head), row
        assert re.search(r"\]\((tests|docs)/", row[1]), row
