"""Features that change something, each another thing: the matrix must find it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import hostcallback as hcb
from tools.nothing_changed.features import Feature


def wrapping(wrapped: Callable[[Any], Any], **options: Any) -> Feature:
    def enter(edits: Any, folder: Path) -> Any:
        edits.wrapped = wrapped
        return contextlib.nullcontext()

    return Feature("wrong", enter, **options)


def doing(action: Callable[[], Any]) -> Feature:
    def enter(edits: Any, folder: Path) -> Any:
        action()
        return contextlib.nullcontext()

    return Feature("wrong", enter, taps=False)


def tapping(edits: Any, folder: Path) -> Any:
    edits.logged = lambda values: hcb.id_tap(lambda value: None, values)
    return contextlib.nullcontext()


def one_bit(step: Any) -> Any:
    def call(*args: Any) -> Any:
        (params, state), losses = step(*args)
        return (params, state), losses.at[7].set(jnp.nextafter(losses[7], jnp.inf))

    return call


def traced_twice(step: Any) -> Any:
    def call(*args: Any) -> Any:
        jax.make_jaxpr(step)(*args)
        jax.clear_caches()
        return step(*args)

    return call


def lowered_within_another(step: Any) -> Any:
    def another(*args: Any) -> Any:
        return step(*args)

    return jax.jit(another)


def other_exception(step: Any) -> Any:
    def call(*args: Any) -> Any:
        try:
            return step(*args)
        except LookupError as error:
            raise RuntimeError(str(error)) from error

    return call


RESULTS = wrapping(one_bit)
TRACES = wrapping(traced_twice)
PROGRAMS = wrapping(lowered_within_another)
TAPS = Feature("wrong", tapping, taps=False)
EXCEPTION = wrapping(other_exception)
OUTPUT = doing(lambda: print("a line"))
ERRORS = doing(lambda: print("a line", file=sys.stderr))
STATUS = doing(lambda: atexit.register(os._exit, 3))
KEYS = doing(lambda: jax.config.update("jax_exec_time_optimization_effort", 0.5))
