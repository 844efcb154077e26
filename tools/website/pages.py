"""Copies the pages of docs/ for the site, and puts each into the navigation."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

SECTIONS = {
    "Start": ["tutorial", "questions", "examples", "comparison", "limits"],
    "How-to guides": [
        "progress", "metrics", "data", "checks", "observe", "capsules", "ui", "notebooks", "pytest",
        "accelerate", "control", "tap-log", "diff", "convert",
        "flight-recorder", "forwarding", "scaling", "nats", "otlp", "migrating",
    ],
    "Reference": ["settings", "environment", "command-line", "transformations", "gpu", "security", "support"],
    "Benchmarks": ["benchmarks", "reliability", "nothing-changed"],
    "Design": ["architecture", "contributing", "wire-format"],
}  # fmt: skip
"""The pages of each section in order. Pages that are in none of them are how-to guides; docs/design is design."""

OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[\w./-]+)\)")


def title(page: Path) -> str:
    """Returns the first heading of a page, without marks for code."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{page.name} has no title: begin the page with a line such as '# Progress bars'")
    return found[1].replace("`", "")


def stage(target: Path) -> list[Any]:
    """Copies all pages and pictures to a folder. Returns the navigation."""
    for path in sorted(DOCS.rglob("*")):
        copy = target / path.relative_to(DOCS)
        if path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                copy.write_text(for_site(path.read_text(encoding="utf-8"), path), encoding="utf-8")
            else:
                shutil.copy(path, copy)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = re.sub(r"\]\(docs/", "](", re.sub(r"\]\(([A-Z]+\.md)\)", _own_page, readme))
    home = re.sub(r"\]\(design\)", "](architecture.md)", home)
    (target / "index.md").write_text(
        re.sub(r"\[([^\]]*)\]\((?:tests|examples)/[\w./]+\)", r"\1", home), encoding="utf-8"
    )
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        text = re.sub(r"\]\(([A-Z]+\.md)\)", _own_page, text)
        (target / _page_name(name)).write_text(text, encoding="utf-8")
    return navigation()


def navigation() -> list[Any]:
    """Returns the navigation of the pages of docs/, as MkDocs reads it."""
    known = {name for names in SECTIONS.values() for name in names}
    unknown = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in known)
    found: list[Any] = [{"Home": "index.md"}]
    for section, names in SECTIONS.items():
        names = [*names, *unknown] if section == "How-to guides" else names
        pages = [{title(DOCS / f"{name}.md"): f"{name}.md"} for name in names]
        if section == "Start":
            pages.insert(2, {"Gallery": "gallery/index.md"})
        if section == "Reference":
            pages.insert(0, {"API": "reference/index.md"})
        if section == "Design":
            pages += [{title(path): f"design/{path.name}"} for path in sorted((DOCS / "design").glob("*.md"))]
            pages += [{"Changelog": "project-changelog.md"}, {"Contribute": "project-contributing.md"}]
            pages.append({"Report a vulnerability": "project-security.md"})
        found.append({section: pages})
    return found


def for_site(text: str, page: Path) -> str:
    """Returns the text of a page. A link to a file outside docs/ becomes the name of the file."""

    def outside(link: re.Match[str]) -> str:
        file = (page.parent / link[2]).resolve()
        if file.is_relative_to(DOCS):
            return link[0]
        if file.parent == ROOT and file.name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
            return f"[{link[1]}]({_page_name(file.name)})"
        name = str(file.relative_to(ROOT))
        return link[1] if name in link[1] else f"{link[1]} (`{name}`)"

    text = OUTSIDE.sub(outside, text)
    return re.sub(r"\]\(design\)", "](architecture.md)", text)


def _page_name(name: str) -> str:
    return f"project-{name.lower()}"


def _own_page(link: re.Match[str]) -> str:
    return f"]({_page_name(link[1])})"
