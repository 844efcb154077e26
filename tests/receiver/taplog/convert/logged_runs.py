"""Tap logs of real programs, for the tests of conversions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb

STEPS = 6


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


@hcb.jit
def train(x: Any) -> Any:
    """Taps of scalars, arrays, a print and a check that fails in its last two steps."""

    def body(carry: Any, i: Any) -> tuple[Any, None]:
        grads = [carry * jnp.arange(6.0).reshape(2, 3), carry > 2]
        hcb.id_tap(nothing, {"step": i, "loss": carry, "grads": grads}, name="train")
        hcb.print("c is {c}", c=carry)
        hcb.check(carry < STEPS - 2, "c is {}", carry)
        return carry + 1, None

    return lax.scan(body, x, jnp.arange(STEPS))[0]


@hcb.jit
def odd(y: Any) -> Any:
    """Leaves of every sort, in one message."""
    value = {
        "bf16": jnp.array([1.5, jnp.nan], jnp.bfloat16),
        "int4": jnp.array([[1, -2]], jnp.int4),
        "f8": jnp.ones((3,), jnp.float8_e4m3fn),
        "complex": jnp.array([1 + 2j, 0], jnp.complex64),
        "key": jax.random.key(3),
        "yes": jnp.array(True),
        "big": jnp.array([2**32 - 1], jnp.uint32),
        "empty": jnp.zeros((0, 2)),
        "text": "a text",
        "none": None,
    }
    hcb.id_tap(nothing, (value, y), name="odd")
    hcb.id_tap(nothing, None, name="no array")
    return y


@contextlib.contextmanager
def recorded(log: Path) -> Any:
    """Records the taps in the block. Checks may fail in it."""
    with contextlib.suppress(hcb.TapFunctionException):
        with hcb.outfeed_receiver(record=log):
            yield


def record_train(log: Path) -> Path:
    """The log of one `train`."""
    with recorded(log):
        train(jnp.float32(0))
    return log


def record_odd(log: Path) -> Path:
    """The log of one `odd`."""
    with recorded(log):
        odd(jnp.float32(7))
    return log
