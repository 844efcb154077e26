"""Shared by tests of `hcb.print`: the same program with both prints, and the output of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

import hostcallback as hcb


class Printed:
    """Runs one program with both prints, and compares."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def ours(self, program: Callable[..., Any], *args: Any) -> str:
        """Output of `program(print, *args)` with our print."""
        self._capsys.readouterr()
        program(hcb.print, *args)
        hcb.barrier_wait()
        return self._capsys.readouterr().out

    def jaxs(self, program: Callable[..., Any], *args: Any) -> str:
        """Its output with JAX's print. Ordered, as ours is by default."""
        self._capsys.readouterr()
        program(functools.partial(jax.debug.print, ordered=True), *args)
        jax.effects_barrier()
        return self._capsys.readouterr().out

    def alike(self, program: Callable[..., Any], *args: Any) -> list[str]:
        """The lines that both print."""
        expected = self.jaxs(program, *args)
        assert self.ours(program, *args) == expected
        return expected.splitlines()
