"""Environment variables: one module lists and reads them, and the documents name exactly these."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostcallback.receiver import environment
from python_process import python_output

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "environment.md"
MODULE = ROOT / "hostcallback" / "receiver" / "environment.py"
SOURCES = sorted((ROOT / "hostcallback").rglob("*.py"))
NAME = re.compile(r"\bHOSTCALLBACK_[A-Z][A-Z_]*[A-Z]\b")
KNOWN = {variable.name for variable in environment.VARIABLES}


def strings(path: Path) -> Iterator[str]:
    """Every string literal of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def reads(path: Path) -> Iterator[str]:
    """The names of the variables that a module reads; the source text if the name is not a literal."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(attr="get" | "pop", value=ast.Attribute(attr="environ"))):
                name = node.args[0]
            case ast.Call(func=ast.Attribute(attr="getenv")):
                name = node.args[0]
            case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Load()):
                name = node.slice
        if name is not None:
            yield str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)


def test_the_list_is_sorted_and_holds_every_variable_of_the_module() -> None:
    names = [variable.name for variable in environment.VARIABLES]
    assert names == sorted(set(names))
    declared = {value for value in vars(environment).values() if isinstance(value, environment.Variable)}
    assert declared == set(environment.VARIABLES)


@pytest.mark.slow
def test_no_other_module_reads_a_variable_of_ours() -> None:
    found = {path: set(reads(path)) for path in SOURCES if path != MODULE}
    # Those of others: of shells, terminals and other tools.
    assert set().union(*found.values()) <= {
        "COMP_LINE",
        "FORCE_COLOR",
        "JAX_TRACEBACK_FILTERING",
        "NO_COLOR",
        "NPROC",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "PYTHONPATH",
        "TERM",
        "XDG_RUNTIME_DIR",
        "XLA_FLAGS",
    }
    named = [path for path in found if any(NAME.fullmatch(text) for text in strings(path))]
    assert named == []


def test_native_code_reads_no_variable() -> None:
    native = [path for path in (ROOT / "receiver" / "native").rglob("*") if path.suffix in (".cc", ".h")]
    assert native
    assert [path for path in native if re.search(r"\b(secure_)?getenv\b", path.read_text())] == []


def test_messages_and_docstrings_name_only_known_variables() -> None:
    named = {(path, name) for path in SOURCES for text in strings(path) for name in NAME.findall(text)}
    assert {(path, name) for path, name in named if name not in KNOWN} == set()


def test_the_documents_name_exactly_these() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {name for path in documents for name in NAME.findall(path.read_text(encoding="utf-8"))}
    assert named == KNOWN
    assert "docs/environment.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_reference_page_is_the_tools_output() -> None:
    paths = [str(ROOT / "tools" / "documents"), str(ROOT)]
    code = f"import sys; sys.path[:0] = {paths}; import environment; sys.stdout.write(environment.document())"
    written = python_output("-c", code, timeout_sec=60)
    assert DOCUMENT.read_text(encoding="utf-8") == written, "run tools/documents/environment.py"


def test_the_installer_reads_the_listed_switch() -> None:
    assert f'SWITCH = "{environment.BUILD_NATIVE}"' in (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (environment.ACCELERATE, " Verbose ", "verbose"),
        (environment.ACCELERATE, "", ""),
        (environment.CONTROL_FILE, "rules.toml", Path("rules.toml")),
        (environment.CONTROL_FILE, " ", None),
        (environment.LOG_LEVEL, "debug", 10),
        (environment.LOG_LEVEL, "35", 35),
        (environment.RING_BYTES, "4096", 4096),
        (environment.RING_BYTES, "", None),
        (environment.RUN, "exp42", "exp42"),
        (environment.TAP_TANGENTS, "0", False),
        (environment.TAP_TANGENTS, "", True),
        (environment.TRANSPORT, "Native", "native"),
    ],
)
def test_a_variable_gives_its_value(
    variable: environment.Variable[object], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    assert variable.read() == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (environment.ACCELERATE, "yes"),
        (environment.CONTROL_SOCKET, "off"),
        (environment.LOG_LEVEL, "LOUD"),
        (environment.RING_BYTES, "8 MiB"),
        (environment.RING_BYTES, "0"),
        (environment.TRANSPORT, "pigeon"),
    ],
)
def test_a_value_that_is_not_expected_raises_with_the_name(
    variable: environment.Variable[object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=rf"^{variable.name}='{text}'") as raised:
        variable.read()
    assert "expected" in str(raised.value) or "use one of" in str(raised.value)
