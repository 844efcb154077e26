"""Checks the project's own rules, which no general linter knows: `python tools/lint_project.py [ROOT]`.

Prints `file:line: the finding; the cure` for every violation and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # Python leaves it out where PYTHONSAFEPATH is set

import lint_prose  # noqa: E402

FOLDERS = ("hostcallback", "tests", "tools", "examples")
RECEIVER = ("hostcallback", "receiver")
MAX_LINES = 500
MAX_MODULES = 15
"""Of one folder. A header and its source file are one module; `__init__.py` is none."""


class Name(NamedTuple):
    """A dotted name as the file uses it, with import aliases resolved."""

    line: int
    dotted: str
    imported: bool


class Finding(NamedTuple):
    """One violation."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.as_posix()}:{self.line}: {self.text}"


def names(tree: ast.Module) -> Iterator[Name]:
    """Every absolute name that is imported, and every attribute chain that starts at an imported name.

    `import jax as j; j.lax.scan` gives `jax` (imported) and `jax.lax.scan`, `jax.lax`.
    """
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
                yield Name(node.lineno, alias.name, imported=True)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = dotted
                yield Name(node.lineno, dotted, imported=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = attribute_chain(node)
            if chain and chain[0] in aliases:
                yield Name(node.lineno, ".".join([aliases[chain[0]], *chain[1:]]), imported=False)


def attribute_chain(node: ast.expr) -> list[str]:
    """`["a", "b", "c"]` for the expression `a.b.c`; empty if it does not start at a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def is_private(dotted: str) -> bool:
    """Whether the name is not a public API of JAX: a `_name` in jax, or any name inside jaxlib."""
    package, _, rest = dotted.partition(".")
    parts = [part for part in rest.split(".") if part and not part.startswith("__")]
    if package == "jaxlib":
        return bool(parts)
    return package == "jax" and any(part.startswith("_") for part in parts)


def is_receiver(dotted: str) -> bool:
    """Whether the name belongs to the host side, which receiver/ may import."""
    return f"{dotted}.".startswith("hostcallback.receiver.")


def broken_rule(name: Name, path: Path) -> str | None:
    """Message about a forbidden name in this file, if any. `path` is relative to the root."""
    package = name.dotted.partition(".")[0]
    folder = path.parts[0]
    in_compat = path.parts[:2] == ("hostcallback", "_jax_compat")
    if is_private(name.dotted) and not in_compat:
        return f"private name {name.dotted}; it belongs in hostcallback/_jax_compat/, with its reason"
    if name.dotted == "jax.__version_info__" and folder == "hostcallback" and not in_compat:
        return "version of JAX; what depends on it belongs in hostcallback/_jax_compat/versions.py"
    above = package in ("jax", "jaxlib", "hostcallback") and not is_receiver(name.dotted)
    if name.imported and path.parts[:2] == RECEIVER and above:
        return f"receiver/ imports {package}; only hostcallback/ may, receiver/ runs without it"
    in_remote = path.parts[:3] == (*RECEIVER, "remote")
    if name.imported and package == "grpc" and folder == "hostcallback" and not in_remote:
        return "grpc outside receiver/remote/; the rest must run without it"
    if name.dotted == "time.sleep" and folder == "tests":
        return "time.sleep in a test; wait for a state (an event, a condition, a join), never for a time"
    return None


def check_file(path: Path, root: Path = ROOT) -> list[Finding]:
    """The violations in one Python file."""
    relative = path.relative_to(root)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(relative))
    found = {
        Finding(relative, name.line, text) for name in names(tree) if (text := broken_rule(name, relative))
    }
    if relative.parts[:2] == RECEIVER:
        text = "another program's text without foreign(...) around it, which makes it safe to show"
        found |= {Finding(relative, line, text) for line in unescaped(tree)}
    # `jax._src` is found in `jax._src.core` too; one report is enough.
    per_line = {finding.line: finding for finding in sorted(found, reverse=True)}
    return sorted(per_line.values())


def foreign_text(node: ast.AST) -> bool:
    """Whether an expression is a text that another program has written: a call's status, the error of an answer."""
    match node:
        case ast.Call(func=ast.Attribute(attr="details" | "debug_error_string"), args=[]):
            return True
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="error"), *_]):
            return True
        case ast.Subscript(slice=ast.Constant(value="error"), ctx=ast.Load()):
            return True
        case ast.Attribute(attr="error_message"):
            return True
    return False


def unescaped(tree: ast.Module) -> Iterator[int]:
    """The lines that use another program's text without `foreign(...)` directly around it."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    escaped = {
        id(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "foreign" and call.args
    }
    return (
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and foreign_text(node) and id(node) not in escaped
    )


def python_files(root: Path = ROOT) -> list[Path]:
    """Every Python file that the rules hold for."""
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def check_sizes(root: Path = ROOT) -> list[Finding]:
    """The files with too many lines and the folders with too many modules, except vendored ones."""
    found = []
    modules: dict[Path, set[str]] = {}
    for path in (path for folder in FOLDERS for path in (root / folder).rglob("*")):
        if path.suffix not in (".py", ".cc", ".h") or {"third_party", "__pycache__"}.intersection(path.parts):
            continue
        relative = path.relative_to(root)
        if path.stem != "__init__":
            modules.setdefault(relative.parent, set()).add(path.stem)
        lines = path.read_bytes().count(b"\n")
        if lines > MAX_LINES:
            found.append(Finding(relative, lines, f"{lines} lines, at most {MAX_LINES}: split it by purpose"))
    for folder, stems in modules.items():
        if len(stems) > MAX_MODULES:
            text = f"{len(stems)} modules, at most {MAX_MODULES}: make sub-folders by purpose"
            found.append(Finding(folder, 1, text))
    return sorted(found)


NATIVE = Path("hostcallback", "receiver", "native")
_GUARD = re.compile(r"^#ifndef (\w+_H_)$", re.MULTILINE)


def check_guards(root: Path = ROOT) -> list[Finding]:
    """The C++ headers whose guard is not their path."""
    found = []
    for path in sorted((root / NATIVE).rglob("*.h")):
        if "third_party" in path.parts:
            continue
        parts = path.relative_to(root / NATIVE).with_suffix("").parts
        expected = f"HOSTCALLBACK_{'_'.join(parts).upper()}_H_"
        guard = _GUARD.search(path.read_text(encoding="utf-8"))
        if guard is not None and guard[1] != expected:
            found.append(Finding(path.relative_to(root), 1, f"the header's guard must be {expected}"))
    return found


def check_test_names(root: Path = ROOT) -> list[Finding]:
    """The test modules whose name another one has: pytest imports them by their file name alone, and fails."""
    first: dict[str, Path] = {}
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        other = first.setdefault(path.name, path)
        if other is not path:
            text = f"{other.relative_to(root).as_posix()} has the same name: rename one"
            found.append(Finding(path.relative_to(root), 1, text))
    return found


def check_prose(path: Path, root: Path = ROOT) -> list[Finding]:
    """The idioms in the prose of one file."""
    found = [Finding(path.relative_to(root), line, text) for line, text in lint_prose.idioms(path, root)]
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Checks the tree below ROOT, this checkout by default; returns the exit status."""
    root = Path(arguments[0]).resolve() if arguments else ROOT
    files = python_files(root)
    documents = lint_prose.prose_files(root, FOLDERS)
    findings = [finding for path in files for finding in check_file(path, root)]
    findings += check_sizes(root) + check_test_names(root) + check_guards(root)
    findings += [finding for path in documents for finding in check_prose(path, root)]
    for finding in findings:
        print(finding)
    print(f"lint_project: {len(files)} files, {len(findings)} violations")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
