"""Finds idioms that plain technical English does without, in documents, comments, docstrings and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IDIOMS = (
    "whoever",
    "likewise",
    "nobody",
    "somebody",
    "is through",
    "so many",
    "said of",
    "as ever",
    "anew",
    "for ever",
    "by way of",
    "beside",
    "of its own",
)


class Allowed(NamedTuple):
    """A text that the check passes over, and why."""

    path: str
    """File or folder in which it may be written."""
    text: str
    """Text that may be written there; empty for all of the file."""
    reason: str


ALLOWED = (
    Allowed("tools/lint_prose.py", "", "lists the idioms"),
    Allowed("tests/project/test_lint_project.py", "", "plants idioms for the check to find"),
    Allowed("", "--beside", "an option of `hcb convert`, which scripts use"),
)

_WORDS = "|".join(idiom.replace(" ", r"\s+") for idiom in IDIOMS)
_IDIOM = re.compile(rf"\b({_WORDS})\b", re.IGNORECASE)


class Prose(NamedTuple):
    """A text that people read, and the line on which it begins."""

    line: int
    text: str


def idioms(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and message for every idiom in one file."""
    relative = path.relative_to(root).as_posix()
    allowed = [entry.text for entry in ALLOWED if _is_in(relative, entry.path)]
    if "" in allowed:
        return
    source = path.read_text(encoding="utf-8")
    for prose in _prose(path.suffix, source):
        text = prose.text
        for quotation in allowed:
            text = text.replace(quotation, "_" * len(quotation))
        for match in _IDIOM.finditer(text):
            line = prose.line + text.count("\n", 0, match.start())
            idiom = " ".join(match[0].split())
            yield line, f'"{idiom}" in prose; write it plainly (subject, verb, the field\'s words)'


def prose_files(root: Path, folders: tuple[str, ...]) -> list[Path]:
    """The files whose prose is checked: documents and all source files, except vendored ones."""
    found = [path for path in (root / "README.md", root / "CHANGELOG.md") if path.exists()]
    found += (root / "docs").rglob("*.md")
    for folder in folders:
        found += (path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cc", ".h"))
    return sorted(path for path in found if not {"__pycache__", "third_party"}.intersection(path.parts))


def _is_in(name: str, folder: str) -> bool:
    return not folder or name == folder or name.startswith(f"{folder}/")


def _prose(suffix: str, source: str) -> Iterator[Prose]:
    if suffix == ".py":
        yield from _strings(source)
        yield from _blocks(_python_comments(source))
    elif suffix in (".cc", ".h"):
        yield from _blocks(_native_comments(source))
    else:
        yield Prose(1, source)


def _strings(source: str) -> Iterator[Prose]:
    """Docstrings, messages and every other string literal; of f-strings the parts between the values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Prose(node.lineno, node.value)


def _python_comments(source: str) -> Iterator[Prose]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(token.start[0], token.string[1:])


def _native_comments(source: str) -> Iterator[Prose]:
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?<!:)//+(.*)", line):
            yield Prose(number, match[1])


def _blocks(comments: Iterator[Prose]) -> Iterator[Prose]:
    """Comments on consecutive lines as one text, since an idiom may be broken over two lines."""
    first, lines = 0, list[str]()
    for line, text in comments:
        if lines and line != first + len(lines):
            yield Prose(first, "\n".join(lines))
            lines = []
        if not lines:
            first = line
        lines.append(text)
    if lines:
        yield Prose(first, "\n".join(lines))
