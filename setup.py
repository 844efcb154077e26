"""Compiles the native transport, one plain C-ABI shared library, into the package; the rest is in setup.cfg."""

import functools
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NATIVE = Path("hostcallback", "receiver", "native")
SWITCH = "HOSTCALLBACK_BUILD_NATIVE"


@functools.cache
def tool(path: str) -> ModuleType:
    """Loads a module of tools/ by path: an isolated build has no tools/ to import from."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "tools" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_native() -> ModuleType:
    """The module that compiles the library."""
    return tool("build_native.py")


class BuildLibrary(build_ext):
    """Builds the library where setuptools expects an extension module: beside its sources or in a wheel."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library has a plain name, without a Python ABI in it: ctypes loads it by path."""
        return str(Path(*fullname.split(".")[:-1], build_native().library_name()))

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links every native source in one go.

        Raises:
            SystemExit: there is no compiler, or it failed; the text says which, and names the switch.
        """
        native = build_native()
        try:
            native.compile_native(Path(self.get_ext_fullpath(ext.name)).absolute())
        except native.BuildError as error:
            # Ends the build with the sentence alone: pip shows it beneath the setuptools log.
            raise SystemExit(f"error: {error}") from None


class AnyPythonWheel(bdist_wheel):
    """One wheel per platform serves every Python: the library knows none."""

    def get_tag(self) -> tuple[str, str, str]:
        """`py3-none-<platform>`, or `py3-none-any` without the library."""
        return "py3", "none", super().get_tag()[2]


def extensions() -> list[Extension]:
    """The library, unless HOSTCALLBACK_BUILD_NATIVE=0 asks for a pure Python package."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise SystemExit(
            f"error: {SWITCH}={value!r} was not understood: expected 1 (compile the native transport, the "
            "default) or 0 (build without it)"
        )
    if value == "0":
        return []
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / NATIVE).rglob("*.cc"))
    return [Extension("hostcallback.receiver.native.libhostcallback", sources)]


def version() -> str:
    """The version, as setup.cfg has it read from the package."""
    text = (ROOT / "hostcallback" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def page() -> dict[str, Any]:
    """What the package's page shows: the README and the links."""
    description = tool("releasing/description.py")
    address = description.repository()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return {
        "long_description": description.long_description(readme, address, version()),
        "long_description_content_type": "text/markdown",
        "project_urls": description.project_urls(address, version()),
    }


setup(
    **page(),
    packages=find_packages(include=["hostcallback", "hostcallback.*"]),
    # An editable install then is a path, not a finder: Python looks in paths first, and a script that lies next to the
    # checkout, a folder of the package's name, would import the folder.
    package_dir={"": "."},
    py_modules=["hostcallback_pytest"],
    ext_modules=extensions(),
    data_files=[("share/man/man1", ["docs/hcb.1"])],  # where man finds the page of a command in bin/
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
)
