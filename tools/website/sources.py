"""Pages of the site with source files: the tests, examples and tools that documents link to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".md": "markdown", ".cfg": "ini", ".toml": "toml"}


def is_shown(file: Path) -> bool:
    """Whether a file has a page: one that can be read, in the repository."""
    return file.is_file() and file.suffix in LANGUAGES and file.is_relative_to(ROOT)


def page_of(file: Path) -> str:
    """The page of a file, from the top of the site."""
    return f"source/{file.relative_to(ROOT).as_posix()}.md"


def stage(files: Iterable[Path], target: Path) -> None:
    """Writes the pages of files. The search does not find them."""
    for file in files:
        page = target / page_of(file)
        page.parent.mkdir(parents=True, exist_ok=True)
        name = file.relative_to(ROOT).as_posix()
        code = file.read_text(encoding="utf-8").rstrip()
        page.write_text(
            f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {file.name}\n\n"
            f'````{LANGUAGES[file.suffix]} title="{name}" linenums="1"\n{code}\n````\n',
            encoding="utf-8",
        )
