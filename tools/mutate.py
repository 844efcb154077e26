"""Changes random lines of the package, one at a time, and counts the changes that tests notice.

`python tools/mutate.py [--lines 200] [--seed 0] [--room receiver/wire]` copies the checkout to a temporary folder,
changes one place there (a comparison, a number, an `and`, a `not`, a call left out), and runs the quick tests of its
room, first those that name its module; what they do not notice runs through the fast tests of all rooms with `--all`.
Prints each change with the test that notices it, and how many of all were noticed. Changes in the native library are
built first. 200 lines take hours: `--after 60` goes on with the 61st of the same lines.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("hostcallback")

ALSO = {
    "api": (
        "api/taps",
        "api/calls",
        "api/checks",
        "api/loops",
        "api/accelerate",
        "api/breakpoints",
        "api/debug",
        "api/capsule",
        "lifecycle",
        "notebooks/test_live_plot.py",
    ),
    "lowering": ("api/taps", "api/calls", "api/accelerate", "api/observe"),
    "primitives": ("api/taps", "api/calls"),
    "tracing": ("api/taps", "api/checks"),
    "sync": ("lifecycle",),
    "_jax_compat": ("lowering", "api/taps", "api/calls", "api/observe"),
    "receiver/capsule": ("api/capsule", "hostile"),
    "receiver/failures": ("api/checks",),
    "receiver/sinks": ("api/outputs", "api/loops", "api/taps", "api/observe", "notebooks/test_live_plot.py"),
    "receiver/taplog": ("api/outputs",),
    "receiver/runtime": ("lifecycle", "receiver/native/ring"),
    "receiver/native": ("api/taps", "api/calls", "api/checks"),
    "receiver/native/handlers": ("api/taps", "api/calls", "api/checks"),
    "receiver/native/reductions": ("api/checks", "api/observe"),
    "receiver/native/ring": ("api/taps", "api/calls"),
    "": ("host_callback", "testing", "api/taps", "receiver/wire", "receiver/taplog"),
}
"""More folders and files in tests/ that notice a change in a room. The first is that of its name, if there is one."""

NONE_FOUND = 5
"""Status of pytest if no test was found."""

SECONDS = 600
"""How long the tests may take. A change that makes them hang is noticed."""


class Mutation(NamedTuple):
    """A change of a file: the text between two offsets is replaced."""

    path: Path
    line: int
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        source = (ROOT / self.path).read_text(encoding="utf-8")
        return f"{self.path}:{self.line}: {source[self.start : self.end]!r} becomes {self.text!r}"


SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
}


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    # Not those in f-strings: before Python 3.12 their columns are wrong.
    yield node
    if not isinstance(node, ast.JoinedStr):
        for inner in ast.iter_child_nodes(node):
            yield from _nodes(inner)


def python_mutations(path: Path) -> Iterator[Mutation]:
    """The changes that a Python module offers."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    data = source.encode()

    def offset(line: int, column: int) -> int:
        return len(data[: lines[line - 1] + column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr, operator: object) -> Iterator[Mutation]:
        old, new = SWAPPED.get(type(operator), ("", ""))
        start, end = span(left)[1], span(right)[0]
        if old and (found := re.search(rf"(?<!\w){re.escape(old)}(?!\w)", source[start:end])):
            start, end = start + found.start(), start + found.end()
            yield Mutation(path, source.count("\n", 0, start) + 1, start, end, new)

    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, operator, right in zip(
                [node.left, *node.comparators], node.ops, node.comparators, strict=False
            ):
                yield from between(left, right, operator)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = span(node)[0]
            yield Mutation(path, node.lineno, start, start + len("not "), "")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Mutation(path, node.lineno, *span(node), str(node.value + 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Mutation(path, node.lineno, *span(node), str(not node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutation(path, node.lineno, *span(node), "pass")


NATIVE = (("<=", "<"), (" < ", " <= "), (" > ", " >= "), (">=", ">"), ("==", "!="), ("!=", "=="), ("&&", "||"),
          ("||", "&&"), (" + 1", " + 2"), (" - 1", " - 2"), ("true;", "false;"), ("false;", "true;"))  # fmt: skip


def native_mutations(path: Path) -> Iterator[Mutation]:
    """The changes that a C++ file offers."""
    source = (ROOT / path).read_text(encoding="utf-8")
    for old, new in NATIVE:
        for found in re.finditer(re.escape(old), source):
            line = source.count("\n", 0, found.start()) + 1
            text = source.splitlines()[line - 1].strip()
            if not text.startswith(("//", "#", "static_assert", "template", "constexpr bool")):
                yield Mutation(path, line, found.start(), found.end(), new)


def sample(count: int, seed: int, room: str) -> list[Mutation]:
    """Random changes, at most one per line, each line as likely as any other."""
    by_line: dict[tuple[Path, int], list[Mutation]] = {}
    for file in sorted((ROOT / PACKAGE / room).rglob("*")):
        path = file.relative_to(ROOT)
        if "third_party" in path.parts or file.suffix not in (".py", ".cc"):
            continue
        offers = python_mutations if file.suffix == ".py" else native_mutations
        for mutation in offers(path):
            by_line.setdefault((path, mutation.line), []).append(mutation)
    chance = random.Random(seed)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


def in_order(path: Path, tests: list[str], root: Path = ROOT) -> list[str]:
    """The files of these tests in a checkout, first those that name the changed module most often."""
    word = re.compile(rf"\b{re.escape(path.stem)}\b")
    files = [
        file
        for name in tests
        for file in (sorted((root / name).rglob("test_*.py")) if (root / name).is_dir() else [root / name])
    ]
    often = {file: len(word.findall(file.read_text(encoding="utf-8"))) for file in files}
    return [str(file.relative_to(root)) for file in sorted(often, key=lambda file: -often[file])]


def tests_of(path: Path) -> list[str]:
    """The folders and files of tests of a module's room: of the nearest folder that has some, and of those around."""
    rooms = [room.as_posix() for room in path.relative_to(PACKAGE).parents][:-1]
    own = [f"tests/{room}" for room in rooms if room != "api" and (ROOT / "tests" / room).exists()][:1]
    also = [f"tests/{folder}" for room in rooms for folder in ALSO.get(room, ())]
    return list(dict.fromkeys(own + also)) or [f"tests/{folder}" for folder in ALSO[""]]


class Copy:
    """A copy of the checkout in which changes are tried."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "checkout"
        kept = shutil.ignore_patterns(
            ".git", ".venv", ".matrix", ".upstream", "build", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=kept)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self._root),
            "HOSTCALLBACK_TRANSPORT": "native",
            "PYTHONDONTWRITEBYTECODE": "1",  # a change of the same length in the same second would not be seen
        }
        # Without the library each change would seem to be noticed.
        if not any((self._root / PACKAGE / "receiver" / "native").glob("libhostcallback.*")):
            status, output = self._run(["tools/build_native.py"])
            if status:
                raise RuntimeError(f"the native library cannot be built:\n{output}")

    def noticed_by(self, mutation: Mutation, tests: list[str]) -> str:
        """What fails with a change: a test, the compiler, or the time; empty if all of these tests pass."""
        file = self._root / mutation.path
        source = file.read_text(encoding="utf-8")
        file.write_text(source[: mutation.start] + mutation.text + source[mutation.end :], encoding="utf-8")
        try:
            return self.failing(in_order(mutation.path, tests, self._root), build=file.suffix == ".cc")
        finally:
            file.write_text(source, encoding="utf-8")
            if file.suffix == ".cc":
                self._run(["tools/build_native.py"])

    def failing(self, tests: list[str], build: bool = False) -> str:
        """The first of these tests that fails, "the compiler", or "the time"; empty if all pass."""
        if build and self._run(["tools/build_native.py"])[0]:
            return "the compiler"
        options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not eager", "-n", "2"]
        status, output = self._run(["-m", "pytest", *options, *tests])
        if status == 0:
            return ""
        if status == NONE_FOUND:  # not the change's doing
            raise RuntimeError(f"pytest found no tests: {' '.join(tests)}\n{output}")
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return found[1] if found else output.strip().rpartition("\n")[2] or f"status {status}"

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        command = [sys.executable, *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return 1, f"the time ({SECONDS} s)"
        return done.returncode, done.stdout


def main() -> int:
    """Tries the changes; returns 1 if the tests fail without one."""
    parser = argparse.ArgumentParser(
        prog="python tools/mutate.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", type=int, default=200, help="number of lines that are changed (200)")
    parser.add_argument("--seed", type=int, default=0, help="which lines (0)")
    parser.add_argument("--room", default="", help="a folder of the package, such as receiver/wire (all)")
    parser.add_argument("--all", action="store_true", help="run the fast tests of all rooms for survivors")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="leave out the first N lines (0)")
    options = parser.parse_args()
    mutations = sample(options.lines, options.seed, options.room)[options.after :]
    noticed, survived = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        rooms = {tuple(tests_of(mutation.path)) for mutation in mutations}
        for room in sorted(rooms) if options.after == 0 else ():
            if test := copy.failing(list(room)):
                print(f"without a change, the tests of {' '.join(room)} fail here: mend {test} first")
                return 1
        for number, mutation in enumerate(mutations, options.after + 1):
            if test := copy.noticed_by(mutation, tests_of(mutation.path)):
                noticed += 1
                print(f"{number}: noticed by {test}: {mutation}", flush=True)
            elif options.all and (test := copy.noticed_by(mutation, ["tests"])):
                print(f"{number}: noticed by the fast tests only, {test}: {mutation}", flush=True)
            else:
                survived += 1
                print(f"{number}: survived: {mutation}", flush=True)
    print(f"{len(mutations)} changes: {noticed} noticed by the room's quick tests, {survived} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
