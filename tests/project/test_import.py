"""Importing hostcallback is cheap, imports no JAX, and is enough for taps under any jit."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hostcallback
from checkout import ROOT
from hostcallback import receiver
from python_process import python_output

LOADED = """
import sys
{before}
there = set(sys.modules)
{statement}
print(*sorted(set(sys.modules) - there))
"""

LATER = tuple(
    f"hostcallback.{name}"
    for name in (
        *("api", "host_callback", "lifecycle", "sync", "tracing"),
        *(f"receiver.{path.name}" for path in (ROOT / "receiver").iterdir() if path.is_dir()),
    )
)
"""What `import hostcallback` does not load: nearly all of it."""


def loaded(statement: str, before: str = "") -> set[str]:
    return set(python_output("-c", LOADED.format(statement=statement, before=before)).split())


def test_with_jax_there_few_modules_are_loaded() -> None:
    modules = loaded("import hostcallback", before="import jax")
    ours = {name for name in modules if name.partition(".")[0] == "hostcallback"}
    assert "hostcallback.primitives.effects" in ours
    assert not [name for name in ours if name.startswith(LATER)]
    assert len(ours) <= 35
    # JAX itself imports some; hostcallback must not import the others.
    packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert packages <= {"hostcallback", "jax", "jaxlib"}
    assert not modules & {"jax.extend.core", "grpc", "msgpack", "asyncio", "tomllib", "multiprocessing"}


def test_without_jax_only_the_package_itself_is_loaded() -> None:
    modules = loaded("import hostcallback")
    assert {name for name in modules if name.partition(".")[0] == "hostcallback"} == {
        "hostcallback",
        "hostcallback._one_copy",
        "hostcallback._with_jax",
        "hostcallback.receiver",
        "hostcallback.receiver.public_names",
    }
    assert not modules & {"jax", "jaxlib", "numpy", "grpc", "msgpack", "asyncio", "logging"}


@pytest.mark.parametrize(
    "statement",
    [
        "import hostcallback.receiver",
        "import hostcallback; hostcallback.receiver.LogReader",
        "from hostcallback import Forward, HostCallbackError, record",
        "from hostcallback.receiver.cli import main",
    ],
)
def test_the_host_side_is_loaded_without_jax(statement: str) -> None:
    assert not loaded(statement) & {"jax", "jaxlib", "hostcallback.api", "grpc"}


def test_a_tap_loads_only_its_own_modules() -> None:
    modules = loaded("import hostcallback; hostcallback.id_tap", before="import jax")
    unneeded = (
        *("receiver.cli", "receiver.remote", "receiver.taplog.", "receiver.runtime.knobs"),
        *("receiver.sinks.printing", "receiver.sinks.progress.bars", "receiver.sinks.metric_writers"),
        *("api.accelerate", "api.receiver", "host_callback"),
    )
    assert not [
        name for name in modules if name.startswith(tuple(f"hostcallback.{part}" for part in unneeded))
    ]
    assert "grpc" not in modules


INSTALLED = """
import importlib.util, sys
{imports}
print("hostcallback.primitives.effects" in sys.modules, "hostcallback.api.accelerate" in sys.modules)
from hostcallback.primitives import effects
print(effects.installed, type(jax.__loader__).__name__, type(jax.__spec__.loader).__name__)
print([type(finder).__name__ for finder in sys.meta_path].count("_JaxFinder"))
"""
ORDERS = [
    "import jax, hostcallback",
    "import hostcallback, jax",
    "import hostcallback.receiver, jax",
    "import hostcallback; importlib.util.find_spec('jax'); import jax",
    "import hostcallback; import jax.numpy; import jax",
]


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS)
def test_taps_are_dispatched_fast_whichever_is_imported_first(imports: str) -> None:
    out = python_output("-c", INSTALLED.format(imports=imports))
    assert out.splitlines() == ["True False", "True SourceFileLoader SourceFileLoader", "0"]


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS[:2])
def test_the_environment_accelerates_whichever_is_imported_first(imports: str) -> None:
    out = python_output("-c", INSTALLED.format(imports=imports), HOSTCALLBACK_ACCELERATE="1")
    assert out.splitlines()[0] == "True True"


EXPORTING = """
import jax, jax.export, hostcallback as hcb
from jax import numpy as jnp
program = jax.jit(lambda x: hcb.id_print(x, name="seen") * 2)
exported = jax.export.export(program, disabled_checks=hcb.export_checks())(jnp.float32(0))
open(PATH, "wb").write(exported.serialize())
"""
CALLING = """
import jax, jax.export, hostcallback
from jax import numpy as jnp
program = jax.export.deserialize(bytearray(open(PATH, "rb").read()))
assert float(program.call(jnp.float32(3))) == 6
"""


@pytest.mark.slow
@pytest.mark.native_only  # Python callbacks are not exported
def test_an_exported_program_taps_in_a_process_that_only_imports(tmp_path: Path) -> None:
    path = f"PATH = {str(tmp_path / 'program')!r}\n"
    python_output("-c", path + EXPORTING)
    assert python_output("-c", path + CALLING) == "3.\n"


@pytest.mark.parametrize("package", [hostcallback, receiver])
def test_each_name_is_what_type_checkers_find_in_the_stub(package: ModuleType) -> None:
    assert package.__file__ is not None
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name: node.module or "" for node in imports for alias in node.names}
    assert all(
        alias.asname == alias.name for node in imports for alias in node.names
    )  # else it is not exported
    assert {*package.__all__} == {*names} - {*getattr(package, "_NAMED_AS_BUILTINS", ()), "receiver"}
    for name, module in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(module), name), name


@pytest.mark.parametrize(("old", "new"), [("Head", "TruncatedArray"), ("otlp_exporter", "otlp")])
def test_an_old_name_warns_and_is_the_new_one(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"hostcallback.{old} is called {new} now") as warned:
        assert getattr(hostcallback, old) is getattr(hostcallback, new)
    assert warned[0].filename == __file__
    assert old not in dir(hostcallback)


def test_a_removed_name_says_what_to_do_instead() -> None:
    with pytest.raises(AttributeError, match=r"'metrics': it was removed; send values with hcb\.metrics"):
        _ = receiver.metrics  # type: ignore[attr-defined]


def test_every_name_is_listed_and_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert set(hostcallback.__all__) <= set(dir(hostcallback))
    with pytest.raises(AttributeError, match="module 'hostcallback' has no attribute 'id_tapp'"):
        _ = hostcallback.id_tapp  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'id_tapp'"):
        from hostcallback import id_tapp  # type: ignore[attr-defined]  # noqa: F401


def test_the_folder_in_a_checkout_is_not_imported_by_its_own_name() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\ntry: import receiver\nexcept ImportError as e: print(e)"
    assert "import that one" in python_output("-c", program)
