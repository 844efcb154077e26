"""The documents' links lead somewhere, and what the README's table says of this package is linked to its proof."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkout import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).resolve().exists()
    ]
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
