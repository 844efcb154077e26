"""Compiles C++ programs of tests with the library's sources and flags."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from checkout import ROOT

SOURCES = ROOT / "receiver" / "native"
HERE = Path(__file__).parent

spec = importlib.util.spec_from_file_location("build_native", ROOT / "tools" / "build_native.py")
build_native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_native)

try:
    COMPILER = build_native.find_compiler()
except build_native.BuildError:
    COMPILER = None
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


def compile_program(sources: list[Path], output: Path, *flags: str) -> None:
    command = [
        *COMPILER,
        "-std=c++17",
        f"-I{SOURCES}",
        f"-I{HERE}",
        *flags,
        *map(str, sources),
        "-o",
        str(output),
    ]
    command += build_native.LIBRARIES
    subprocess.run(command, check=True, capture_output=True, text=True)
