"""Configuration flags of JAX, and values that the processes of one program share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax._src import (
    config as _config,  # bool_flag, int_flag: define flags, which JAX has no public way of
    distributed as _distributed,  # global_state.client: what the processes of a program share
)


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


def shared_value(key: str, value: str, timeout_sec: float) -> str | None:
    """What the first process of the program to call this gave for `key`; None in a program of one process.

    Raises:
        jax.errors.JaxRuntimeError: the coordinator of `jax.distributed` cannot be reached.
    """
    client: Any = _distributed.global_state.client
    if client is None:
        return None
    # Another process was first, or the next call raises what is wrong.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(key, value)
    # Also for the process that has set it: so all of them return what the coordinator has.
    found: str = client.blocking_key_value_get(key, int(timeout_sec * 1000))
    return found
