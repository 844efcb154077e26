"""Writes the tables of rooms of docs/architecture.md from the docstrings: `python tools/documents/rooms.py`.

The rooms are those of the layers in pyproject.toml, from the top down, with the folders inside each.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = ("hostcallback", "hostcallback.receiver")
BEGIN, END = "<!-- rooms of {} -->\n", "<!-- end of rooms -->"


def purpose(path: Path) -> str:
    """The first sentence of the docstring of a module, or of a folder's `__init__.py`."""
    file = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)])\. (?=[A-Z])", first)[0].removesuffix(".").replace("|", "\\|")


def rooms(package: str) -> Iterator[Path]:
    """The rooms of a package, from the top down: its folders, and its modules outside of them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [package]:
            for name in (name.strip() for layer in contract["layers"] for name in layer.split("|")):
                path = ROOT.joinpath(*package.split("."), name)
                yield path if path.is_dir() else path.with_suffix(".py")


def table(package: str) -> str:
    """The rooms of a package with the purpose of each."""
    base = ROOT.joinpath(*package.split("."))
    lines = [f"| `{base.name}/`, top down | purpose |", "|---|---|"]
    for room in rooms(package):
        if room == ROOT / "hostcallback" / "receiver":
            continue
        inside = sorted(path.parent for path in room.rglob("*/__init__.py")) if room.is_dir() else []
        for path in (room, *inside):
            name = path.relative_to(base).as_posix()
            lines.append(f"| `{name}{'/' if path.is_dir() else ''}` | {purpose(path)} |")
    return "\n".join(lines) + "\n"


def documented(text: str) -> str:
    """The document with the rooms of now."""
    for package in PACKAGES:
        begin = BEGIN.format(package)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        text = f"{before}{begin}{table(package)}{END}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
