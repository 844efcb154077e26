"""`make wheel` builds wheels that an environment without a compiler installs, and that run there."""

from __future__ import annotations

import importlib.util
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
from typing import Any

import pytest

from checkout import ROOT

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.slow,  # compiles
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="the names of the wheels are those of Linux on x86_64",
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]
pytest.importorskip("auditwheel", reason="needs pip install 'hostcallback[wheel]'")

from elftools.elf.elffile import ELFFile  # noqa: E402  (of auditwheel)

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".matrix", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info",
    "*.so", "shared",
)  # fmt: skip

LIBRARY = "hostcallback/receiver/native/libhostcallback.so"
ADDRESS = "https://github.com/owner/name"
ZIG = importlib.util.find_spec("ziglang") is not None

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


def run(
    line: list[str | Path], timeout: float = 110, **options: str | Path | dict[str, str]
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*map(str, line)], capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def versions_needed(library: Path) -> list[Any]:
    """The versions of symbols that a library needs of other libraries."""
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.version_r")
        return [version for _, versions in section.iter_versions() for version in versions]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels that `make wheel` builds of a copy of the sources, by kind."""
    folder = tmp_path_factory.mktemp("wheels")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=NOT_SOURCE)
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "HOSTCALLBACK_BUILD_NATIVE")}
    clean["REPOSITORY_URL"] = ADDRESS
    # The first time zig compiles the C++ library for each machine, too.
    run(
        [sys.executable, "tools/releasing/wheel.py", "--output", folder],
        cwd=folder / "checkout",
        env=clean,
        timeout=900,
    )
    (native,) = folder.glob("*-py3-none-manylinux*_x86_64.whl")
    (pure,) = folder.glob("*-py3-none-any.whl")
    assert list(folder.glob("*.tar.gz"))
    return {"native": native, "pure": pure, **dict(zip(["arm"], folder.glob("*_aarch64.whl"), strict=False))}


def test_the_wheels_have_types_and_commands_and_no_tests(wheels: dict[str, Path]) -> None:
    for kind, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        libraries = {name for name in names if re.search(r"\.(so|dylib|o)\b", name)}
        expected = set() if kind == "pure" else {LIBRARY}
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
    # Without zig the system's headers decide: those of glibc 2.38 and newer need that one.
    assert int(glibc[1]) <= (17 if ZIG else 34 if own < 38 else own)


def test_the_page_of_the_package_has_absolute_links_and_the_picture(wheels: dict[str, Path]) -> None:
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
            page = archive.read(name).decode()
        assert f"Project-URL: Source, {ADDRESS}\n" in page
        assert f"Project-URL: Changelog, {ADDRESS}/blob/" in page
        assert re.search(rf"!\[[^\]]+\]\({ADDRESS}/raw/\w+/docs/images/demo\.png\)", page)
        links = re.findall(r"\]\(([^)\s]+)\)", page)
        assert len(links) > 40
        assert [link for link in links if not link.startswith("https://")] == []
        files = [link.partition("/blob/")[2].partition("/")[2] for link in links if "/blob/" in link]
        assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.skipif(not ZIG, reason="needs the package ziglang")
@pytest.mark.parametrize(("kind", "machine"), [("native", "x86_64"), ("arm", "aarch64")])
def test_a_library_needs_no_newer_glibc_and_its_ring_works(
    wheels: dict[str, Path], tmp_path: Path, kind: str, machine: str
) -> None:
    assert re.search(rf"-py3-none-manylinux2014_{machine}\.manylinux_2_17_{machine}\.whl$", wheels[kind].name)
    with zipfile.ZipFile(wheels[kind]) as archive:
        archive.extract(LIBRARY, tmp_path)
    needed = {
        version.name.removeprefix("GLIBC_")
        for version in versions_needed(tmp_path / LIBRARY)
        if version.name.startswith("GLIBC_")
    }
    assert needed
    assert max(tuple(map(int, version.split("."))) for version in needed) <= (2, 17)
    emulator: list[str | Path] = []
    if machine != platform.machine():
        found, root = (
            shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64"),
            Path("/usr/aarch64-linux-gnu"),
        )
        if not found or not root.exists():
            pytest.skip(
                "needs qemu and a C library for ARM: apt-get install qemu-user-static libc6-arm64-cross"
            )
        emulator = [found, "-L", root]
    program, source = tmp_path / "round_trip", Path(__file__).with_name("ring_round_trip.c")
    headers = ROOT / "hostcallback" / "receiver" / "native"
    compiler = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        f"{machine}-linux-gnu.2.17",
        "-O1",
        "-Wall",
        "-Werror",
    ]
    run([*compiler, f"-I{headers}", source, "-o", program, "-lpthread", "-ldl"], timeout=600)
    assert run([*emulator, program, tmp_path / LIBRARY]).stdout == "10000 frames\n"


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
