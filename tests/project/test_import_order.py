"""Each module can be the first that a program imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import ROOT
from python_process import python_output

EACH_FIRST = """
import builtins, importlib, os, sys
import jaxlib.xla_client, msgpack, numpy, scipy.linalg, scipy.special
if sys.argv[1] == "jax":
    import jax, jax.experimental.buffer_callback  # once, not in each child, which notes its imports of them

imported = []
import_of_python = builtins.__import__

def noted(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0:
        imported.append(name.partition(".")[0])
    return import_of_python(name, globals, locals, fromlist, level)

for module in sys.argv[2:]:
    child = os.fork()
    if not child:
        builtins.__import__ = noted
        try:
            importlib.import_module(module)
            if "jax" in imported:
                assert "hostcallback.primitives.effects" in sys.modules, "JAX was not changed"
        except ModuleNotFoundError as error:
            if error.name.startswith("hostcallback"):
                print(module, repr(error), flush=True)
        except BaseException as error:
            print(module, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Prints the modules that cannot be imported first. A package that is not installed is not their fault."""


def failed(*modules: str, before: str = "") -> str:
    return python_output("-c", EACH_FIRST, before, *modules, timeout_sec=500)


def modules_of(package: str, folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[-1] != "__main__" and not (package == "hostcallback" and parts[0] == "receiver"):
            found.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return found


@pytest.mark.slow
def test_the_modules_around_the_change_to_jax_can_be_imported_first() -> None:
    assert not failed(
        "hostcallback._jax_compat",
        "hostcallback.primitives.effect_dispatch",
        "hostcallback.primitives.effects",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "folder", "at_least"),
    [("hostcallback", "hostcallback", 80), ("hostcallback.receiver", "receiver", 200)],
)
def test_modules_of_each_room_can_be_imported_first(package: str, folder: str, at_least: int) -> None:
    modules = modules_of(package, ROOT / folder)
    assert len(modules) >= at_least
    assert not failed(*modules, before="jax" if package == "hostcallback" else "")
    if (
        package == "hostcallback"
    ):  # some in a process in which they are the first to import JAX, which takes a second
        assert not failed(*modules[::40])


TRACED_ONCE = """
import jax
import hostcallback as hcb

calls = []

@jax.jit
def step(x):
    calls.append(x)
    return x + 1

step(1.0)
for name in hcb.__all__:
    getattr(hcb, name)
    step(1.0)
    assert len(calls) == 1, name
jax.jit(lambda x: hcb.scan(lambda c, _: (hcb.id_tap(print, c), None), x, length=2, progress=False))(1.0)
hcb.barrier_wait()
step(1.0)
assert len(calls) == 1, "a tap"
"""


@pytest.mark.slow
def test_what_was_compiled_before_a_name_is_used_is_not_traced_again() -> None:
    python_output("-c", TRACED_ONCE)
