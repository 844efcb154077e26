"""Programs on CPU devices that wait for the host without holding a thread of XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hostcallback.receiver import processes
from hostcallback.receiver.native import bindings as native_library

TARGET = "hostcallback_hold"
OPERAND_SIZE = 4096
"""Elements of the operand. XLA runs a program with less work on the dispatching thread."""


def begin() -> None:
    """Makes programs of `held_program` wait from now on."""
    native_library.load().hcb_hold_begin()


def end() -> bool:
    """Lets these programs go on. Returns whether they were being held."""
    return bool(native_library.load().hcb_hold_end())


@functools.cache
def held_program(device: jax.Device) -> Callable[[], Any]:
    """Returns a function that dispatches a program and returns its result, a uint8 scalar.

    The program ends at once, or waits if `begin` was called.
    """
    # Compiled ahead of time, so that it is not traced again under the user's settings of JAX.
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(native_library.load().hcb_hold), platform="cpu")
    flag = jax.ShapeDtypeStruct((), np.dtype(np.uint8))

    def hold(x: Any) -> Any:
        return jax.ffi.ffi_call(TARGET, flag, has_side_effect=True)(jnp.sum(x))

    with jax.disable_jit(False), jax.transfer_guard("allow"):
        operand = jax.device_put(np.zeros(OPERAND_SIZE, np.float32), device)
        compiled = jax.jit(hold).lower(operand).compile()
    return functools.partial(compiled, operand)


def forget() -> None:
    """Drops compiled programs, for a forked child."""
    held_program.cache_clear()


processes.in_child(processes.Stage.PROGRAM, forget)
