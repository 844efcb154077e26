"""The libraries whose tests run, and which of their tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JAX = "0.10.2"
"""The JAX of the default pair."""


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        name: its name on the package registry, and of the folder of its checkout.
        version: of the package that is installed, and of the tests.
        every: its test folders and files; `--full` runs these.
        selected: files or tests that run by default, which print, call back, compile, export or loop.
        excluded: tests that run in no setting, as `--deselect` takes them, because they take very long or need a network.
        requirements: further packages that its tests import.
        environment: variables for its tests.
    """

    name: str
    version: str
    every: tuple[str, ...]
    selected: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "equinox",
            "0.13.8",
            ("tests",),
            ("tests/test_while_loop.py",),
            requirements=("beartype==0.22.9", "optax==0.2.8"),
        ),
    )
}
"""The libraries by name, in the order in which they run."""
