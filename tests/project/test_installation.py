"""The first command of a newcomer: what `make demo` installs, and what it says when it cannot."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from checkout import ROOT

CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")


@pytest.fixture
def installer() -> Iterator[ModuleType]:
    """tools/install.py as a module, freshly loaded."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def make(venv: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs make in this checkout with another virtual environment."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    # What an outer make sets (this suite runs under `make test`) would make this one print as a make within a make.
    outer = (
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
        "MAKEOVERRIDES",
        "VENV",
        "PYTHON",
        "CXX",
        "HOSTCALLBACK_BUILD_NATIVE",
    )
    clean = {k: v for k, v in os.environ.items() if k not in outer}
    return subprocess.run(
        [make, f"VENV={venv}", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def executable(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_a_wrong_python_is_refused_before_an_environment_is_made(tmp_path: Path) -> None:
    old = executable(tmp_path / "python3.9", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    result = make(tmp_path / "venv", f"PYTHON={old}", "demo")
    assert result.returncode == 2
    assert result.stdout == ""
    sentence, *rest = result.stderr.splitlines()
    assert sentence == (
        f"make: {old} is Python 3.9.2: hostcallback needs Python 3.11 or newer with the venv module "
        "(Debian: apt install python3-venv); name one with make PYTHON=/path/to/python demo"
    )
    assert len(rest) == 1  # make's own
    assert not (tmp_path / "venv").exists()


def test_without_a_compiler_the_last_sentence_names_the_command_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "head", "touch", "rm", "find"):
        (folder / name).symlink_to(shutil.which(name) or name)
    result = make(tmp_path / "venv", f"PYTHON={sys.executable}", "demo", PATH=str(folder))
    assert result.returncode == 2
    *_, sentence, own = result.stderr.splitlines()
    assert sentence.startswith("hostcallback: no C++ compiler was found")
    assert sentence.endswith("HOSTCALLBACK_BUILD_NATIVE=0 make demo)")
    assert own.startswith("make: ***")
    assert not (tmp_path / "venv").exists()  # nothing was downloaded in vain


def test_an_environment_whose_python_is_gone_is_replaced_next(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    stamp = venv / ".installed-demo"

    (venv / "bin" / "python").symlink_to(sys.executable)
    stamp.touch()
    (venv / ".installed").touch()
    kept = make(venv, "-n", f"PYTHON={sys.executable}", "demo")
    assert "tools/install.py" not in kept.stdout
    assert "examples/train_digits.py" in kept.stdout

    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    again = make(venv, "-n", f"PYTHON={sys.executable}", "demo")
    assert f"tools/install.py {venv} demo" in again.stdout
    assert not stamp.exists()


@pytest.mark.slow
def test_a_broken_environment_is_replaced(
    installer: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    (venv / "left").touch()
    assert not installer.is_usable(venv)
    installer.make_environment(venv)
    assert installer.is_usable(venv)
    assert not (venv / "left").exists()
    assert "cannot be used: its Python does not run" in capsys.readouterr().out
    installer.make_environment(venv)  # does nothing
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "  Downloading jaxlib-0.10.2-cp311-cp311-manylinux_2_27_x86_64.whl (82.1 MB)\n",
            "jaxlib 0.10.2 (82.1 MB)",
        ),
        ("  Downloading https://host/a/numpy-2.3.1-cp311-x.whl (16.9 MB)\n", "numpy 2.3.1 (16.9 MB)"),
        ("Using cached scipy-1.16.0-cp311-cp311-x.whl (35.3 MB)\n", "scipy 1.16.0 (35.3 MB)"),
        ("  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)\n", ""),
        ("  Building editable for hostcallback (pyproject.toml): started\n", "compiling the native library"),
        ("Installing collected packages: six, numpy, jax\n", "writing 3 packages"),
        ("Collecting jax>=0.8.0\n", ""),
    ],
)
def test_what_pip_does_is_told(
    installer: ModuleType, line: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOSTCALLBACK_BUILD_NATIVE", raising=False)
    assert installer.progress(line) == told


def test_the_demo_imports_what_its_extra_installs() -> None:
    demo = CONFIG["options.extras_require"]["demo"].split()
    extra = {name.partition(">=")[0] for name in demo}
    assert extra == {"matplotlib", "optax", "tqdm"}  # each is small; more would make the first command slow
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "examples" / "train_digits.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    # hcb.progress needs tqdm, which the demo does not import itself.
    assert imported - sys.stdlib_module_names == extra - {"tqdm"} | {"hostcallback", "jax", "numpy"}
    assert "hcb.progress(" in (ROOT / "examples" / "train_digits.py").read_text()


def test_the_commands_of_developers_install_what_tests_need() -> None:
    text = (ROOT / "Makefile").read_text()
    needed = {line.partition(":")[0] for line in text.splitlines() if ": $(INSTALLED)" in line}
    assert {"test", "lint", "type", "matrix", "bench"} <= needed
    assert "\ncheck: lint type test" in text
    assert "make check" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_names_every_extra_of_users() -> None:
    ours = {"browser", "demo", "dev", "docs", "libraries", "nothing-changed", "test", "wheel"}
    (line,) = re.findall(
        r"^`pip install '\.\[.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = set(re.findall(r"`(\w+)`", line))
    assert named == set(CONFIG["options.extras_require"]) - ours
