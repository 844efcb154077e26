"""The layers depend in one direction: hostcallback imports hostcallback.receiver, which runs without jax."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from checkout import ROOT
from python_process import run_python

# Imports every module of `hostcallback.receiver` in the given folder, with some packages made impossible to import.
# They include the rest of hostcallback, except for the modules that its import needs. `python -S` does not work (numpy
# is needed), so an import hook refuses them and names the importing module.
PROOF = """
import importlib, pkgutil, sys

def refused(name):
    taken = "hostcallback", "hostcallback._one_copy", "hostcallback._with_jax"
    allowed = name in taken or f"{name}.".startswith("hostcallback.receiver.")
    return name.partition(".")[0] in blocked and not allowed

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if refused(name):
            raise ImportError(f"{name} was imported, and receiver must run without it")

root, blocked, skipped = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
assert not set(blocked) & set(sys.modules), "a blocked package was there before"
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, root)
from hostcallback import receiver
assert list(receiver.__path__)[0].startswith(root), f"not the receiver under test: {receiver.__path__}"
count = 0
for module in pkgutil.walk_packages(receiver.__path__, "hostcallback.receiver."):
    if module.name.startswith(tuple(skipped)) and skipped:
        continue
    if module.name.rpartition(".")[2] in ("__main__", "libhostcallback"):  # the latter is no module, but lies there
        continue
    importlib.import_module(module.name)
    count += 1
assert not list(filter(refused, sys.modules))
print(count)
"""


def prove(root: Path, blocked: str, *skipped: str) -> subprocess.CompletedProcess[str]:
    """Runs the proof on the package `hostcallback.receiver` in `root`, in another process."""
    return run_python("-c", PROOF, root, blocked, *skipped, timeout_sec=60)


def imported_packages(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, also inside functions; of hostcallback not the receiver."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.partition(".")[0] for name in found if not f"{name}.".startswith("hostcallback.receiver.")}


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.fixture
def copied_receiver(tmp_path: Path) -> Path:
    """A copy of the receiver package as it is installed, to plant an import in."""
    package = tmp_path / "hostcallback"
    shutil.copytree(ROOT / "receiver", package / "receiver", ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("__init__.py", "_one_copy.py", "_with_jax.py"):
        shutil.copy(ROOT / "hostcallback" / module, package / module)
    return tmp_path


def test_the_packages_have_modules() -> None:
    assert len(modules_of("receiver")) > 5
    assert len(modules_of("hostcallback")) > 3


@pytest.mark.parametrize("path", modules_of("receiver"), ids=lambda path: path.stem)
def test_receiver_imports_nothing_above_it(path: Path) -> None:
    assert not imported_packages(path) & {"jax", "jaxlib", "hostcallback", "equinox", "optax"}


def test_every_receiver_module_imports_without_jax() -> None:
    result = prove(ROOT, "jax,jaxlib,hostcallback")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= len(modules_of("receiver")) // 2


def test_the_receiver_but_for_its_remote_part_imports_without_grpc() -> None:
    result = prove(ROOT, "jax,jaxlib,hostcallback,grpc", "hostcallback.receiver.remote")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("planted", ["import jax", "from jax import lax", "import hostcallback.api"])
def test_the_proof_catches_a_planted_import(copied_receiver: Path, planted: str) -> None:
    (copied_receiver / "hostcallback" / "receiver" / "planted.py").write_text(planted + "\n")
    result = prove(copied_receiver, "jax,jaxlib,hostcallback")
    assert result.returncode != 0
    assert "was imported, and receiver must run without it" in result.stderr
    assert "planted.py" in result.stderr


def test_the_proof_catches_a_guarded_import(copied_receiver: Path) -> None:
    (copied_receiver / "hostcallback" / "receiver" / "planted.py").write_text(
        "def late():\n    import jax\n    return jax\n\nlate()\n"
    )
    assert "planted.py" in prove(copied_receiver, "jax,jaxlib,hostcallback").stderr


@pytest.mark.slow
def test_the_proof_passes_an_innocent_copy(copied_receiver: Path) -> None:
    result = prove(copied_receiver, "jax,jaxlib,hostcallback")
    assert result.returncode == 0, result.stderr
