"""`make wheel` builds wheels that an environment without a compiler installs, and that run there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from checkout import ROOT

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="the names of the wheels are those of Linux on x86_64",
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
pytest.importorskip("auditwheel", reason="needs pip install 'hostcallback[wheel]'")

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".matrix", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info",
    "*.so", "shared",
)  # fmt: skip

PROGRAM = """
import pathlib, shutil, sys
assert not any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc"))), "there is a compiler"
import jax
import hostcallback as hcb
from hostcallback import receiver
from hostcallback.receiver.native import bindings

site = pathlib.Path(sys.prefix)
assert pathlib.Path(hcb.__file__).is_relative_to(site), hcb.__file__
assert pathlib.Path(receiver.__file__).is_relative_to(site), receiver.__file__
seen = []
with hcb.outfeed_receiver():
    jax.jit(lambda x: hcb.id_tap(lambda value: seen.append(float(value)), x + 1))(1.0)
assert seen == [2.0], seen
try:
    bindings.load()
    print("native")
except Exception as error:
    print(type(error).__name__)
"""


def run(line: list[str | Path], **options: str | Path | dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*map(str, line)], capture_output=True, text=True, timeout=110, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that `make wheel` builds of a copy of the sources, by kind."""
    folder = tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=NOT_SOURCE)
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "HOSTCALLBACK_BUILD_NATIVE")}
    run([sys.executable, "tools/releasing/wheel.py", "--output", folder], cwd=folder / "checkout", env=clean)
    (native,) = folder.glob("*-py3-none-manylinux*_x86_64.whl")
    (pure,) = folder.glob("*-py3-none-any.whl")
    assert list(folder.glob("*.tar.gz"))
    return {"native": native, "pure": pure}


def test_the_wheels_have_types_and_commands_and_no_tests(wheels: dict[str, Path]) -> None:
    for kind, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        libraries = {name for name in names if re.search(r"\.(so|dylib|o)\b", name)}
        expected = {"hostcallback/receiver/native/libhostcallback.so"} if kind == "native" else set()
        assert libraries == expected
        assert {"hostcallback/py.typed", "hostcallback/receiver/py.typed"} <= names
        assert not [name for name in names if re.search(r"(^|/)(tests/|test_\w+\.py$|conftest)", name)]
        assert not [name for name in names if name.startswith("receiver/")]
        assert [name for name in names if name.endswith(".data/data/share/man/man1/hcb.1")]


def test_the_native_library_needs_no_python_and_no_libstdcxx(wheels: dict[str, Path]) -> None:
    shown = run([sys.executable, "-m", "auditwheel", "show", wheels["native"]]).stdout
    assert "libc.so.6" in shown
    assert "libstdc++" not in shown
    assert "libpython" not in shown
    glibc = re.search(r"manylinux_2_(\d+)_x86_64", wheels["native"].name)
    assert glibc
    own = int(platform.libc_ver()[1].split(".")[1])
    assert int(glibc[1]) <= (34 if own < 38 else own)  # headers of glibc 2.38 and newer need that one


@pytest.mark.native_only
@pytest.mark.parametrize(("kind", "loaded"), [("native", "native"), ("pure", "NativeLibraryError")])
def test_a_wheel_installs_and_runs_without_a_compiler(
    wheels: dict[str, Path], tmp_path: Path, kind: str, loaded: str
) -> None:
    home = tmp_path / "environment"
    clean = {
        "HOME": str(tmp_path), "PATH": str(home / "bin"), "JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path),
    }  # fmt: skip
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheels[kind]], env=clean)
    # JAX and the other requirements are those of this environment, behind the wheel: nothing is downloaded.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (home / "lib" / version / "site-packages" / "others.pth").write_text("\n".join(sorted(others)))
    assert run([python, "-c", PROGRAM], cwd=tmp_path, env=clean).stdout.strip() == loaded
    assert (home / "share" / "man" / "man1" / "hcb.1").is_file()
    assert run([home / "bin" / "hcb", "--version"], cwd=tmp_path, env=clean).stdout.startswith("hcb (")
