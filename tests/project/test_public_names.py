"""Every public name of the two packages leads to something."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hostcallback
from hostcallback import receiver

NAMES = [
    pytest.param(package, name, id=f"{package.__name__}.{name}")
    for package in (hostcallback, receiver)
    for name in (*package.__all__, *(hostcallback._NAMED_AS_BUILTINS if package is hostcallback else ()))
]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_can_be_imported(package: object, name: str) -> None:
    assert getattr(package, name) is not None
    assert name in dir(package)


@pytest.mark.parametrize(("name", "meant"), [("prnt", "print"), ("id_tapp", "id_tap")])
def test_python_suggests_the_name_that_was_meant(name: str, meant: str) -> None:
    program = f"import hostcallback as hcb\nhcb.{name}\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.endswith(
        f"AttributeError: module 'hostcallback' has no attribute '{name}'. Did you mean: '{meant}'?\n"
    )
