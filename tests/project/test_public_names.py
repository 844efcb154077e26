"""Every public name of the two packages leads to something."""

from __future__ import annotations

import pytest

import hostcallback
from hostcallback import receiver
from python_process import run_python

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
    done = run_python("-c", program, timeout_sec=60)
    assert done.stderr.endswith(
        f"AttributeError: module 'hostcallback' has no attribute '{name}'. Did you mean: '{meant}'?\n"
    )
