"""What differs between the supported versions of JAX, as constants; flags, and values that processes share.

A new version of JAX is added here first. Some differences are in the parameters of equations, not in the version; the
functions that read those parameters name them.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax._src import (
    callback as _callback,  # emit_python_callback
    config as _config,  # bool_flag, int_flag: define flags, which JAX has no public way of
    core as _core,  # ManualAxisType
    distributed as _distributed,  # global_state: its client has what the processes of a program share
    sharding_impls as _sharding_impls,  # ReplicaAxisContext
)
from jax._src.interpreters import (
    mlir as _mlir,  # jaxpr_subcomp, set_sharding, aval_to_ir_type
    partial_eval as _pe,  # lower_jaxpr, lower_jaxpr2
)

# ---- Signatures: with the other number of arguments, each lowering raises TypeError ----------------------------------

SUBCOMP_TAKES_TRACEBACK = "outer_traceback" in inspect.signature(_mlir.jaxpr_subcomp).parameters
"""From 0.9 on."""

CALLBACK_RETURNS_TOKEN = "returns_token" in inspect.signature(_callback.emit_python_callback).parameters
"""From 0.9 on. Before, a Python callback returns a token if it takes one."""

SET_SHARDING_TAKES_CONTEXT = len(inspect.signature(_mlir.set_sharding).parameters) == 3
"""From 0.10 on."""

AVAL_TO_IR_TYPE_TAKES_CONTEXT = len(inspect.signature(_mlir.aval_to_ir_type).parameters) > 1
"""Not on 0.8.0; on 0.10.2 and 0.12.0.1."""

# ---- Names -----------------------------------------------------------------------------------------------------------

HAS_MANUAL_AXIS_TYPE = hasattr(_core, "ManualAxisType")
"""From 0.10 on, the manual axes over which a value varies are `manual_axis_type.varying`; before, they are `vma`."""

ReplicaAxisContext: Any = getattr(_sharding_impls, "ReplicaAxisContext", ())
"""The axis context of pmap, which runs replicas on 0.8. Later pmap is a jitted shard_map; then this is an empty tuple,
of which nothing is an instance."""

lower_to_lojaxpr: Any = getattr(_pe, "lower_jaxpr2", _pe.lower_jaxpr)
"""Replaces the "high-level" equations of a closed jaxpr. 0.8 has the second name only."""

# ---- Behaviour that no signature shows -------------------------------------------------------------------------------

TOKENS_ENTER_PARTIALLY_MANUAL_REGIONS = jax.__version_info__ >= (0, 12)
"""Whether an ordered effect may be inside a shard_map that leaves some axes to the compiler.

Without this test, XLA aborts the process in `HloSharding::Validate` (0.8.0, 0.10.2, 0.11.0); 0.12.0.1 works.
"""

PERSISTENT_CACHE_CRASHES_ON_TOKENS = (0, 8, 1) <= jax.__version_info__ < (0, 11)
"""Whether a program for several devices that takes tokens must not be written to the persistent cache.

Without this test, jaxlib reads through a null pointer (`SaveLayoutToEmptyProto`) when it serializes the program.
"""


LAUNCH_NUMBERS_REPEAT = jax.__version_info__ < (0, 9)
"""Whether a program that is compiled again repeats the numbers of its launches (`XLA_FFI_RunId_Get`)."""


def define_flag(name: str, default: bool | int, about: str, on_set: Callable[[Any], None]) -> Any:
    """Defines a JAX configuration flag; its `.value` is its current value.

    The drop-in for `host_callback` has flags that JAX removed with that module. Without it, `jax.config.update` raises
    for them: it knows only flags that were defined (0.8 to 0.12).

    Args:
        name: in lower case. The environment variable of that name in upper case sets it, too.
        default: its value until it is set; its type is the flag's.
        about: what it is for.
        on_set: called with each value that it gets, the first one included.
    """
    define: Any = _config.bool_flag if isinstance(default, bool) else _config.int_flag
    read: Any = _config.bool_env if isinstance(default, bool) else _config.int_env
    return define(name, read(name.upper(), default), help=about, update_hook=on_set)


# ---- What the processes of a program share: no public name of JAX reaches its coordinator (0.8 to 0.12) --------------


def shared_value(key: str, value: str, timeout_sec: float) -> str | None:
    """What the first process of the program to call this gave for `key`; None in a program of one process.

    Raises:
        jax.errors.JaxRuntimeError: the coordinator of `jax.distributed` cannot be reached.
    """
    if not has_coordinator():
        return None
    share(key, value)
    # Also for the process that has set it: so all of them return what the coordinator has.
    client: Any = _distributed.global_state.client
    found: str = client.blocking_key_value_get(key, int(timeout_sec * 1000))
    return found


def has_coordinator() -> bool:
    """Whether `jax.distributed` is initialized, and has not been left."""
    return _distributed.global_state.client is not None


def share(key: str, value: str) -> bool:
    """Gives a value to the other processes; False if one of them was first, or if the coordinator is not reached."""
    client: Any = _distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
        client.key_value_set(key, value)
        return True
    return False


def shared_below(folder: str) -> dict[str, str]:
    """The shared values with keys `folder/NAME`, by their names; none if the coordinator is not reached."""
    client: Any = _distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
        return {key.rpartition("/")[2]: value for key, value in client.key_value_dir_get(folder)}
    return {}


def leave_coordinator() -> None:
    """Leaves `jax.distributed` without the barrier in which its shutdown waits for all processes, 300 s by default.

    JAX's exit then does not wait for processes that have failed, and they need not wait for this one.
    """
    state: Any = _distributed.global_state
    for kept in (state.preemption_sync_manager, state.client, state.service):
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # their destructors may wait, too
    state.preemption_sync_manager = state.client = state.service = None
