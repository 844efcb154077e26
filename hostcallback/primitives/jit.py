"""`hostcallback.jit`, which equals `jax.jit`. It exists because earlier versions had fast taps only under this one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

P = ParamSpec("P")
R = TypeVar("R")

_jax_jit: Any = jax.jit  # so that a program may say `jax.jit = hostcallback.jit`


@overload
def jit(fun: Callable[P, R], /, **jax_jit_kwargs: Any) -> Callable[P, R]: ...
@overload
def jit(**jax_jit_kwargs: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(fun: Callable[..., Any] | None = None, /, **jax_jit_kwargs: Any) -> Any:
    """Compiles `fun` as `jax.jit` does, which is all that it does. Taps cost the same under every jit.

    Args:
        fun: the function; omitted in the decorator form, which `jax.jit` has from JAX 0.9 on.
        **jax_jit_kwargs: as `jax.jit` takes them.

    Returns:
        What `jax.jit` returns.

        @hcb.jit(donate_argnums=0)
        def step(state):
            return hcb.id_print(state + 1)
    """
    if fun is None:
        return functools.partial(jit, **jax_jit_kwargs)
    return _jax_jit(fun, **jax_jit_kwargs)
