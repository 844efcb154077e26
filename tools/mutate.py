"""Changes random lines of the package, one at a time, and counts the changes that tests notice.

`python tools/mutate.py [--lines 200] [--seed 0] [--room receiver/wire]` copies the checkout to a temporary folder,
changes one place there (a comparison, a number, an `and`, a `not`, a call left out), and runs the quick tests of its
room, first those that name its module; what they do not notice runs through the fast tests of all rooms with `--all`.
Prints each change with the test that notices it, and how many of all were noticed. Changes in the native library are
built first. 200 lines take hours: `--after 60` goes on with the 61st of the same lines.

`--coverage FILE` is several times faster: only the tests that run a changed line of Python are tried. If there is no
such file yet, it runs the fast tests once under coverage and keeps there which test ran which line (needs pytest-cov).
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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("hostcallback")

ALSO = {
    "api": (
        "api/taps",
        "api/calls",
        "api/checks",
        "api/knobs",
        "api/loops",
        "api/accelerate",
        "api/breakpoints",
        "api/debug",
        "api/capsule",
        "lifecycle",
        "notebooks/test_live_plot.py",
        "sync/test_barrier.py",
    ),
    "lifecycle": ("api/accelerate", "api/watch"),
    "lowering": (
        "api/taps",
        "api/calls",
        "api/accelerate",
        "api/observe",
        "api/knobs",
        "api/loops",
        "api/checks",
    ),
    "primitives": ("api/taps", "api/calls", "api/loops", "api/observe", "api/knobs"),
    "tracing": ("api/taps", "api/checks", "api/observe", "api/breakpoints", "libraries"),
    "sync": ("lifecycle", "api/calls", "api/accelerate", "api/loops"),
    "_jax_compat": ("lowering", "api/taps", "api/calls", "api/capsule", "api/observe"),
    "receiver/capsule": ("api/capsule", "hostile"),
    "receiver/cli": (
        "receiver/taplog/diff",
        "receiver/remote/control",
        "receiver/remote/collector",
        "receiver/remote/forwarding",
        "receiver/ui",
    ),
    "receiver/failures": ("api/checks", "api/taps/test_tracebacks.py"),
    "receiver/sinks": (
        "api/outputs",
        "api/loops",
        "api/taps",
        "api/calls",
        "api/observe",
        "api/breakpoints",
        "notebooks/test_live_plot.py",
    ),
    "receiver/sinks/metric_writers": ("receiver/remote/collector",),
    "receiver/sinks/sharding": ("lowering/sharding", "receiver/remote/sharded"),
    "receiver/sources": ("receiver/native/wire", "receiver/runtime/dispatch", "api/calls"),
    "receiver/taplog": ("api/outputs",),
    "receiver/taplog/format": ("receiver/taplog/reading", "receiver/taplog/recording"),
    "receiver/taplog/writing": ("receiver/taplog/recording",),
    "receiver/remote/delivery": ("receiver/remote/sharded",),
    "receiver/remote/spool": ("receiver/remote/delivery", "receiver/remote/forwarding"),
    "receiver/ui/index": ("receiver/ui",),
    "receiver/wire": ("receiver/native/wire", "receiver/taplog/format", "receiver/taplog/reading"),
    "receiver/runtime": ("lifecycle", "receiver/native/ring", "api/knobs", "api/calls"),
    "receiver/runtime/rules": ("api/checks", "receiver/native/rules"),
    "receiver/native": ("api/taps", "api/calls", "api/checks"),
    "receiver/native/handlers": ("api/taps", "api/calls", "api/checks", "api/accelerate"),
    "receiver/native/reductions": ("api/checks", "api/observe"),
    "receiver/native/ring": ("api/taps", "api/calls"),
    "": ("host_callback", "testing", "api/taps", "receiver/wire", "receiver/taplog"),
}
"""More folders and files in tests/ that notice a change in a room. The first is that of its name, if there is one."""

NONE_FOUND = (4, 5)
"""Status of pytest if it does not find a test that it is given, or none at all."""

SECONDS = 3600
"""How long tests may take. One that a change makes hang fails after 120 s, by the settings of pytest."""

FEW = 60
"""Up to this number of tests run in one process: to start others takes longer."""

STARTS = re.compile(
    r"\b(run_pythons?|start_python|python_output|run_tapped|subprocess|hcb_command|CollectorProcess|controlled)\b"
)
"""What a file of tests names that starts processes."""

PYTEST = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not eager"]

COVERAGE = """[run]
core = ctrace
source_pkgs = hostcallback
parallel = true
data_file = {file}
patch = subprocess
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-contexts, couldnt-parse, \
no-sysmon, dynamic-conflict
"""
"""Settings of coverage: lines that run at import, or in a process that a test starts, are of no test."""


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


def unseen(path: Path, tests: list[str], runs: list[str]) -> list[str]:
    """Those of these tests' files that may run a line where coverage did not see it: they start processes.

    All files if no test was seen to run it: it runs at import, in C++, or in a thread that XLA started.
    """
    files = in_order(path, tests)
    if not runs:
        return files
    return [file for file in files if STARTS.search((ROOT / file).read_text(encoding="utf-8"))]


def statement_lines(source: str, line: int) -> range:
    """The lines from the start of the innermost statement of a module that holds a line, to that line."""
    starts = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt | ast.excepthandler) and node.lineno <= line <= (node.end_lineno or line)
    ]
    return range(max(starts, default=line), line + 1)


def of_room(tests: list[str], path: Path) -> list[str]:
    """Those of these tests that are tests of a module's room, first those of files that name the module most often."""
    inside = tuple(name + "::" if name.endswith(".py") else name + "/" for name in tests_of(path))
    by_file: dict[str, list[str]] = {}
    for test in tests:
        if test.startswith(inside):
            by_file.setdefault(test.partition("::")[0], []).append(test)
    return [test for file in in_order(path, [*by_file]) for test in by_file[file]]


class Coverage:
    """Which fast tests run which line of the package, as coverage found it."""

    def __init__(self, data: Any) -> None:
        """`data` is a `coverage.CoverageData` that was read."""
        self._data = data
        self._files: dict[str, list[str]] = {}  # tests copy the package, too
        for name in data.measured_files():
            self._files.setdefault(name.rpartition(f"/{PACKAGE}/")[2], []).append(name)

    @classmethod
    def read(cls, file: Path) -> Coverage:
        """Reads what `Copy.measure` wrote."""
        from coverage import CoverageData

        data = CoverageData(str(file))
        data.read()
        return cls(data)

    def tests(self, mutation: Mutation) -> tuple[list[str], bool]:
        """The tests that run a changed line, and whether these are all.

        They are not if the line runs at import or in another process, which coverage assigns to no test.
        """
        if mutation.path.suffix != ".py":
            return [], False
        lines = statement_lines((ROOT / mutation.path).read_text(encoding="utf-8"), mutation.line)
        contexts: set[str] = set()
        for name in self._files.get(mutation.path.relative_to(PACKAGE).as_posix(), ()):
            by_line = self._data.contexts_by_lineno(name)
            contexts.update(context for line in lines for context in by_line.get(line, ()))
        tests = {context.rpartition("|")[0] for context in contexts} - {""}  # FILE::TEST|run
        # Coverage does not see threads that XLA started, so a line that it never saw may have run.
        return sorted(tests), bool(contexts) and "" not in contexts


class Copy:
    """A copy of the checkout in which changes are tried."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "checkout"
        self._sound: set[str] = set()  # tests that pass without a change
        self._changed = int(time.time())  # when a source file was last changed, or later
        kept = shutil.ignore_patterns(
            ".git", ".venv", ".matrix", ".upstream", "build", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=kept)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self._root),
            "HOSTCALLBACK_TRANSPORT": "native",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        # Without the library each change would seem to be noticed.
        if not any((self._root / PACKAGE / "receiver" / "native").glob("libhostcallback.*")):
            status, output = self._run(["tools/build_native.py"])
            if status:
                raise RuntimeError(f"the native library cannot be built:\n{output}")

    def measure(self, file: Path) -> None:
        """Runs the fast tests of the copy under coverage, and writes into a file which of them ran which line."""
        settings = file.with_name(f"{file.stem}_settings.ini")
        settings.write_text(COVERAGE.format(file=file.resolve()), encoding="utf-8")
        options = ["--cov", f"--cov-config={settings.resolve()}", "--cov-context=test", "--cov-report="]
        status, output = self._run(["-m", "pytest", *PYTEST, "-n", "2", *options, "tests"], seconds=None)
        if status not in (0, 1):  # a test that fails because it is slower has run its lines all the same
            raise RuntimeError(f"the fast tests do not run under coverage:\n{output[-2000:]}")

    def noticed_by(self, mutation: Mutation, tests: list[str], without: Sequence[str] = ()) -> str:
        """What fails with a change: a test, the compiler, or the time; empty if all of these tests pass.

        Tests are folders, files, or names of tests; `without`, names of those in them that are left out.
        """
        file = self._root / mutation.path
        source = file.read_text(encoding="utf-8")
        self._write(file, source[: mutation.start] + mutation.text + source[mutation.end :])
        try:
            if not any("::" in test for test in tests):
                tests = in_order(mutation.path, tests, self._root)
            return self.failing(tests, without, build=file.suffix == ".cc")
        finally:
            self._write(file, source)
            if file.suffix == ".cc":
                self._run(["tools/build_native.py"])

    def first_noticed(self, mutation: Mutation, groups: list[list[str]]) -> str:
        """What fails with a change in the first of these groups of tests in which something does; empty if nothing.

        A test that passes with the change when it runs alone has failed by chance, and does not count.

        Raises:
            RuntimeError: that test fails without the change, too.
        """
        by_chance: list[str] = []
        for tests in filter(None, groups):
            while test := self.noticed_by(mutation, tests, by_chance):
                if not test.startswith("tests/"):
                    return test
                if self.noticed_by(mutation, [test]):
                    self._check_sound(test)
                    return test
                by_chance.append(test)
        return ""

    def _check_sound(self, test: str) -> None:
        if test not in self._sound:
            if self.failing([test]):
                raise RuntimeError(f"{test} fails without a change, too: mend it first")
            self._sound.add(test)

    def failing(self, tests: list[str], without: Sequence[str] = (), *, build: bool = False) -> str:
        """The first of these tests that fails, "the compiler", or "the time"; empty if all pass."""
        if build and self._run(["tools/build_native.py"])[0]:
            return "the compiler"
        few = len(tests) < FEW and all("::" in test for test in tests)
        listed = self._root.parent / "tests.txt"
        listed.write_text("\n".join(tests), encoding="utf-8")
        options = ["-x", "--tb=no", "-n", "0" if few else "2", *(f"--deselect={test}" for test in without)]
        status, output = self._run(["-m", "pytest", *PYTEST, *options, f"@{listed}"])
        if status == 0:
            return ""
        if status in NONE_FOUND:  # not the change's doing
            raise RuntimeError(f"pytest found no tests: {' '.join(tests)}\n{output}")
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        return found[1] if found else output.strip().rpartition("\n")[2] or f"status {status}"

    def _write(self, file: Path, source: str) -> None:
        """Writes a source file with a new time of change: Python knows its bytecode by time and length."""
        self._changed += 1
        file.write_text(source, encoding="utf-8")
        os.utime(file, (self._changed, self._changed))

    def _run(self, arguments: list[str], seconds: int | None = SECONDS) -> tuple[int, str]:
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
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return 1, f"the time ({seconds} s)"
        return done.returncode, done.stdout


def main() -> int:
    """Tries the changes."""
    parser = argparse.ArgumentParser(
        prog="python tools/mutate.py", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", type=int, default=200, help="number of lines that are changed (200)")
    parser.add_argument("--seed", type=int, default=0, help="which lines (0)")
    parser.add_argument("--room", default="", help="a folder of the package, such as receiver/wire (all)")
    parser.add_argument("--all", action="store_true", help="run the fast tests of all rooms for survivors")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="leave out the first N lines (0)")
    parser.add_argument(
        "--coverage",
        type=Path,
        metavar="FILE",
        help="run only the tests that run a changed line, by this file of coverage; made if it is missing",
    )
    options = parser.parse_args()
    mutations = sample(options.lines, options.seed, options.room)[options.after :]
    noticed, survived = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if options.coverage and not options.coverage.exists():
            copy.measure(options.coverage)
        coverage = Coverage.read(options.coverage) if options.coverage else None
        for number, mutation in enumerate(mutations, options.after + 1):
            room, fast = tests_of(mutation.path), ["tests"]
            if coverage is None:
                first, then = [room], [fast]
            else:
                runs, are_all = coverage.tests(mutation)
                first, then = [of_room(runs, mutation.path)], [runs]
                if not are_all:
                    first.append(unseen(mutation.path, room, runs))
                    then.append(unseen(mutation.path, fast, runs))
            if test := copy.first_noticed(mutation, first):
                noticed += 1
                print(f"{number}: noticed by {test}: {mutation}", flush=True)
            elif options.all and (test := copy.first_noticed(mutation, then)):
                print(f"{number}: noticed by the fast tests only, {test}: {mutation}", flush=True)
            else:
                survived += 1
                print(f"{number}: survived: {mutation}", flush=True)
    print(f"{len(mutations)} changes: {noticed} noticed by the room's quick tests, {survived} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
