"""Runs programs with JAX's callbacks, without and under `hcb.accelerate()`, and keeps their output."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import hostcallback as hcb


class Ran(NamedTuple):
    """Outcome of one run of a program."""

    result: Any
    calls: list[Any]
    lines: list[str]


class Calls:
    """A callback that remembers its arguments, as Python values."""

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.raw: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.raw.append(args)
        plain = [plainly(arg) for arg in args]
        self.args.append((plain, plainly(kwargs)) if kwargs else plain)


def plainly(tree: Any) -> Any:
    """Arrays as lists and numbers."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist() if hasattr(leaf, "dtype") else leaf, tree)


def ran(program: Callable[[Calls], Any]) -> Ran:
    """Traces and runs `program(callback)`, until every message is delivered."""
    calls, printed = Calls(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = jax.block_until_ready(program(calls))
        hcb.barrier_wait()
        jax.effects_barrier()
    return Ran(plainly(result), calls.args, printed.getvalue().splitlines())


def both(program: Callable[[Calls], Any]) -> tuple[Ran, Ran]:
    """Of JAX, and accelerated; every callback was taken over."""
    jaxs = ran(program)
    with hcb.accelerate() as acceleration:
        ours = ran(program)
    assert acceleration.callbacks
    assert [c.reason for c in acceleration.callbacks if c.reason is not None] == []
    return jaxs, ours


@contextlib.contextmanager
def what_stays() -> Iterator[list[hcb.AcceleratedCallback]]:
    """Within it programs are accelerated; at its end the list has the callbacks that were left to JAX."""
    found: list[hcb.AcceleratedCallback] = []
    with hcb.accelerate() as acceleration:
        yield found
    found += [callback for callback in acceleration.callbacks if callback.reason is not None]
