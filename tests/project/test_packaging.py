"""The package builds as documented: one wheel for every Python, a sufficient sdist, an error without a compiler."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from checkout import ROOT
from python_process import python_output, run_python

pytestmark = pytest.mark.slow  # builds wheels

LIBRARY = "hostcallback/receiver/native/" + (
    "libhostcallback.dylib" if sys.platform == "darwin" else "libhostcallback.so"
)
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
VERSION = re.findall(
    r'^__version__ = "(.*)"', (ROOT / "hostcallback" / "__init__.py").read_text(), re.MULTILINE
)[0]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".matrix", ".*_cache", ".hypothesis", "__pycache__", "build", "dist",
    "*.egg-info", "*.so", "*.dylib", "shared",
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources without anything built."""
    return Path(shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=NOT_SOURCE))


def build(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m build`, with the setuptools at hand instead of a downloaded one; into dist/."""
    options = {"CXX": None, "HOSTCALLBACK_BUILD_NATIVE": None, **environment}
    command = ["-m", "build", "--no-isolation", "--outdir", "dist", *arguments, "."]
    return run_python(*command, cwd=checkout, timeout_sec=110, **options)


def the_file(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def without_compiler(folder: Path) -> str:
    """A PATH on which there is a Python and nothing else."""
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    return str(folder)


@pytest.mark.slow
@pytest.mark.native_only
def test_sdist_then_wheel_for_every_python_that_loads(checkout: Path, tmp_path: Path) -> None:
    result = build(checkout)  # the wheel is built from the unpacked sdist, not from the checkout
    assert result.returncode == 0, result.stdout + result.stderr

    with tarfile.open(the_file(checkout / "dist", "*.tar.gz")) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "tools/build_native.py", "tests/conftest.py"} <= shipped
    assert {
        "hostcallback/receiver/native/third_party/xla/ffi/api/c_api.h",
        "examples/train_digits.py",
    } <= shipped
    assert not [name for name in shipped if name.endswith((".so", ".dylib", ".pyc"))]
    assert not [name for name in shipped if name.startswith("receiver")]  # once is enough

    wheel = the_file(checkout / "dist", "*.whl")
    assert re.fullmatch(rf"hostcallback-{VERSION}-py3-none-(linux|macosx|manylinux)\w+\.whl", wheel.name)
    content = names_in(wheel)
    assert {LIBRARY, "hostcallback/receiver/py.typed", "hostcallback/py.typed"} <= content
    assert {name.partition("/")[0] for name in content} == {
        "hostcallback",
        "hostcallback_pytest.py",
        f"hostcallback-{VERSION}.data",  # the man page
        f"hostcallback-{VERSION}.dist-info",
    }

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = (
        "import hostcallback.receiver.native.bindings as n; n.load(); print(n.__file__); "
        "import sys; assert 'jax' not in sys.modules"
    )
    printed = python_output("-P", "-c", script, timeout_sec=60, PYTHONPATH=str(tmp_path / "installed"))
    assert printed.startswith(str(tmp_path / "installed"))


@pytest.mark.slow
def test_an_editable_build_leaves_the_library_in_the_source_folder(checkout: Path) -> None:
    hook = "from setuptools import build_meta as b; print(b.build_editable('dist'))"
    (checkout / "dist").mkdir()
    python_output("-c", hook, cwd=checkout, timeout_sec=110)
    assert (checkout / LIBRARY).is_file()
    assert LIBRARY not in names_in(the_file(checkout / "dist", "*.whl"))


@pytest.mark.parametrize("kind", ["--wheel", "editable"])
def test_without_a_compiler_the_build_names_the_cure_and_the_switch(
    checkout: Path, tmp_path: Path, kind: str
) -> None:
    path = without_compiler(tmp_path / "bin")
    if kind == "--wheel":
        result = build(checkout, kind, PATH=path)
    else:
        code = "from setuptools import build_meta as b; b.build_editable('.')"
        result = run_python("-c", code, cwd=checkout, timeout_sec=110, PATH=path, CXX="")
    output = result.stdout + result.stderr
    assert result.returncode != 0, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "C++17 compiler" in sentence
    assert "HOSTCALLBACK_BUILD_NATIVE=0" in sentence
    assert "Traceback" not in output


def test_the_switch_builds_a_pure_wheel_without_a_compiler(checkout: Path, tmp_path: Path) -> None:
    result = build(
        checkout, "--wheel", PATH=without_compiler(tmp_path / "bin"), HOSTCALLBACK_BUILD_NATIVE="0"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    wheel = the_file(checkout / "dist", "*.whl")
    assert wheel.name == f"hostcallback-{VERSION}-py3-none-any.whl"
    assert not [name for name in names_in(wheel) if name.endswith((".so", ".dylib"))]


PROGRAM = """
import sys
import receiver
from hostcallback.receiver.wire import frame
assert receiver.MINE and "jax" not in sys.modules

import hostcallback as hcb
import jax

def main():
    with hcb.outfeed_receiver():
        jax.jit(lambda x: hcb.print("x is {}", x))(1.0)
    print(frame.__file__)

main()
"""
"""Has a module with the name of a package here."""


def install(checkout: Path, site: Path, kind: str) -> None:
    """Installs into the folder `site` as pip does: a wheel, or an editable one of some mode."""
    if kind == "wheel":
        result = build(checkout, "--wheel", HOSTCALLBACK_BUILD_NATIVE="0")
    else:
        settings = {"editable_mode": kind.removeprefix("editable, ")}
        (checkout / "dist").mkdir()
        code = f"from setuptools import build_meta as b; b.build_editable('dist', {settings!r})"
        result = run_python("-c", code, cwd=checkout, timeout_sec=110, HOSTCALLBACK_BUILD_NATIVE="0")
    assert result.returncode == 0, result.stdout + result.stderr
    with zipfile.ZipFile(the_file(checkout / "dist", "*.whl")) as archive:
        archive.extractall(site)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("kind", ["wheel", "editable, lenient", "editable, strict", "editable, compat"])
def test_a_program_has_a_receiver_module_and_lies_next_to_a_checkout(
    checkout: Path, tmp_path: Path, kind: str, links: bool
) -> None:
    site, folder = tmp_path / "site", tmp_path / "program"
    if not links and (checkout / "receiver").is_symlink():
        # What git writes where it makes no symbolic links.
        (checkout / "receiver").unlink()
        (checkout / "receiver").write_text("hostcallback/receiver")
    install(checkout, site, kind)
    folder.mkdir()
    (folder / "receiver.py").write_text("MINE = True")
    (folder / "hostcallback").mkdir()  # a clone has the name of the package, and is none
    (folder / "program.py").write_text(PROGRAM)
    # Without the site-packages of these tests (-S), whose .pth files may find another hostcallback; its dependencies
    # come last.
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    start = (
        f"import runpy, site, sys; sys.path[:0] = [{str(folder)!r}]; site.addsitedir({str(site)!r}); "
        f"sys.path += {sorted(dependencies)!r}; runpy.run_path('program.py', run_name='__main__')"
    )
    options = {"PYTHONPATH": None, "HOSTCALLBACK_TRANSPORT": "callback"}
    printed, file = python_output(
        "-S", "-P", "-c", start, cwd=folder, timeout_sec=110, **options
    ).splitlines()
    assert printed == "x is 1.0"
    assert Path(file).is_relative_to(site if kind == "wheel" else checkout)


def test_the_top_level_of_a_checkout_shows_both_halves() -> None:
    if (ROOT / ".git").exists():  # an unpacked sdist has no link
        assert (ROOT / "receiver").readlink() == Path("hostcallback", "receiver")


def test_a_switch_that_is_neither_0_nor_1_is_refused(checkout: Path) -> None:
    result = run_python(
        "setup.py", "--version", cwd=checkout, timeout_sec=60, HOSTCALLBACK_BUILD_NATIVE="off"
    )
    assert result.returncode != 0
    assert "HOSTCALLBACK_BUILD_NATIVE='off' was not understood: expected 1" in result.stderr


def test_runtime_dependencies_are_the_five_that_were_agreed_and_what_exported_programs_need() -> None:
    required = CONFIG["options"]["install_requires"].split()
    assert [re.split(r"[<>=]", name)[0] for name in required] == [
        "jax", "jaxlib", "numpy", "msgpack", "grpcio", "flatbuffers",
    ]  # fmt: skip


def test_the_build_needs_nothing_but_setuptools() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = config["build-system"]["requires"]
    assert requirement.startswith("setuptools")


def test_every_make_target_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"(?:`|^ {4})make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_license_is_apache_2_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
