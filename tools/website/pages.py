"""Copies the pages of docs/ for the site, and puts each into the navigation."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.website import sources

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

SECTIONS: dict[str, list[str]] = {
    "Start": ["story", "tutorial", "questions", "examples", "comparison", "limits"],
    "Reference": ["settings", "environment", "command-line", "transformations", "gpu", "security", "support"],
    "Benchmarks": ["benchmarks", "reliability", "nothing-changed"],
    "Design": ["architecture", "contributing", "wire-format"],
}
"""The pages of each section in order. docs/design is design."""

GUIDES: dict[str, dict[str, str]] = {
    "See what runs": {
        "progress": "Show progress",
        "metrics": "Write metrics",
        "ui": "Look at runs in a browser",
        "notebooks": "Work in a notebook",
    },
    "Find what is wrong": {
        "checks": "Check values, find a NaN",
        "capsules": "Reproduce a failing step",
        "diff": "Find where two runs differ",
        "observe": "See every value inside a model",
        "time": "See which part of a step takes the time",
        "flight-recorder": "See the last moments of a killed process",
        "pytest": "Test with pytest",
    },
    "Keep it and read it": {
        "tap-log": "Record a run to disk",
        "data": "Get data frames",
        "convert": "Convert to other formats",
    },
    "Many processes": {
        "forwarding": "Run a collector for many processes",
        "nats": "Send through a NATS server",
        "scaling": "Plan for a large run",
        "otlp": "Send to OpenTelemetry",
    },
    "Change what runs": {
        "control": "Switch taps while a program runs",
        "knobs": "Change a value while a program runs",
        "stopping": "Stop a loop and keep what it has computed",
        "accelerate": "Make existing callbacks fast",
        "migrating": "Come from another API",
    },
}
"""The how-to guides in groups, each with what its reader wants. Pages that are in no section stand at the end."""

GUIDE = "Guides"

BOOSTS = {"Start": 3.0, GUIDE: 4.0, "Reference": 1.0, "Benchmarks": 0.4, "Design": 0.1}
"""How much a match in a section counts in the search: who looks for "checks" wants the guide, not the design note."""

OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[\w./-]+)\)")
PICTURE = re.compile(r'(!\[[^\]]*\]\(|<img src=")([\w./-]+)\.png(\)|"[^>]*>)')
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def title(page: Path) -> str:
    """Returns the first heading of a page, without marks for code."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{page.name} has no title: begin the page with a line such as '# Progress bars'")
    return found[1].replace("`", "")


def stage(target: Path) -> list[Any]:
    """Copies all pages and pictures to a folder. Returns the navigation."""
    linked: set[Path] = set()
    for path in sorted(DOCS.rglob("*")):
        copy = target / path.relative_to(DOCS)
        if path.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                text = for_site(path.read_text(encoding="utf-8"), path, linked)
                wanted = [members[path.stem] for members in GUIDES.values() if path.stem in members]
                copy.write_text(with_search(text, BOOSTS[section_of(path)], wanted), encoding="utf-8")
            else:
                shutil.copy(path, copy)
    for name in PROJECT:
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        text = re.sub(r"\]\(([A-Z]+\.md)\)", _own_page, text)
        (target / _page_name(name)).write_text(with_search(text, BOOSTS["Design"]), encoding="utf-8")
    (target / "guides.md").write_text(overview(), encoding="utf-8")
    sources.stage(linked, target)
    return navigation()


def section_of(page: Path) -> str:
    """The section of the navigation in which a page of docs/ is."""
    if page.parent != DOCS:
        return "Design"
    return next((section for section, names in SECTIONS.items() if page.stem in names), GUIDE)


def with_search(text: str, boost: float, wanted: Sequence[str] = ()) -> str:
    """Returns a page with its weight in the search, and with words that count more than all others there."""
    hidden = "" if "\n## " in text else "hide: [toc]\n"  # its column is for the page
    return f"---\nsearch:\n  boost: {boost}\ntags: {json.dumps(list(wanted))}\n{hidden}---\n{text}"


def guides() -> dict[str, dict[str, str]]:
    """The groups of guides, with the pages of docs/ that no section names at the end."""
    known = {name for names in [*SECTIONS.values(), *GUIDES.values()] for name in names}
    others = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in known)
    return {**GUIDES, **({"More": {name: title(DOCS / f"{name}.md") for name in others}} if others else {})}


def overview() -> str:
    """The page that lists all guides."""
    parts = ["# Guides\n\nBy what you want to do. Every program on these pages is run by the tests.\n"]
    for group, members in guides().items():
        lines = [
            f"- **[{wanted}]({name}.md)**: {first_sentence(DOCS / f'{name}.md')}"
            for name, wanted in members.items()
        ]
        parts.append(f"## {group}\n\n" + "\n".join(lines) + "\n")
    return with_search("\n".join(parts), BOOSTS[GUIDE])


def first_sentence(page: Path) -> str:
    """Returns the first sentence of prose of a page, without links."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")[1:]
    text = next(paragraph for paragraph in paragraphs if not paragraph.startswith((" ", "```")))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("\n", " "))
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(".:").partition(" (")[0] + "."


def navigation() -> list[Any]:
    """Returns the navigation of the pages of docs/, as MkDocs reads it."""
    found: list[Any] = [{"Home": "index.md"}]
    for section, names in SECTIONS.items():
        pages: list[Any] = [{title(DOCS / f"{name}.md"): f"{name}.md"} for name in names]
        if section == "Reference":
            pages.insert(0, {"API": "reference/index.md"})
        if section == "Design":
            pages += [{title(path): f"design/{path.name}"} for path in sorted((DOCS / "design").glob("*.md"))]
            pages += [{"Changelog": "project-changelog.md"}, {"Contribute": "project-contributing.md"}]
            pages.append({"Report a vulnerability": "project-security.md"})
        found.append({section: pages})
    groups = [
        {group: [{wanted: f"{name}.md"} for name, wanted in members.items()]}
        for group, members in guides().items()
    ]
    found[2:2] = [{GUIDE: [{"Overview": "guides.md"}, *groups]}, {"Gallery": ["gallery/index.md"]}]
    return found


def for_site(text: str, page: Path, linked: set[Path]) -> str:
    """Returns the text of a page. A link to a file outside docs/ leads to the page of that file, noted in `linked`."""

    def outside(link: re.Match[str]) -> str:
        file = (page.parent / link[2]).resolve()
        if file.is_relative_to(DOCS):
            return link[0]
        up = "../" * len(page.parent.relative_to(DOCS).parts)
        if file.parent == ROOT and file.name in PROJECT:
            return f"[{link[1]}]({up}{_page_name(file.name)})"
        if sources.is_shown(file):
            linked.add(file)
            return f"[{link[1]}]({up}{sources.page_of(file)})"
        name = str(file.relative_to(ROOT))
        return link[1] if name in link[1] else f"{link[1]} (`{name}`)"

    text = with_dark_pictures(OUTSIDE.sub(outside, text), page.parent)
    return re.sub(r"\]\(design\)", "](architecture.md)", text)


def with_dark_pictures(text: str, folder: Path) -> str:
    """Returns a page that shows NAME-dark.png, if there is one, in place of NAME.png in dark mode."""

    def both(picture: re.Match[str]) -> str:
        if not (folder / f"{picture[2]}-dark.png").exists():
            return picture[0]
        before, name, after = picture.groups()
        return f"{before}{name}.png#only-light{after}{before}{name}-dark.png#only-dark{after}"

    return PICTURE.sub(both, text)


def _page_name(name: str) -> str:
    return f"project-{name.lower()}"


def _own_page(link: re.Match[str]) -> str:
    return f"]({_page_name(link[1])})"
