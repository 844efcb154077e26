"""`hostcallback.jit`, a synonym of `jax.jit`. In earlier versions only this one had fast taps."""

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
    """Calls `jax.jit`. Taps cost the same under every jit, so programs need not use this one.

    Args:
        fun: the function; omitted in the decorator form, which `jax.jit` has from JAX 0.9 on.
        **jax_jit_kwargs: the keyword arguments of `jax.jit`.

    Returns:
        The result of `jax.jit`; in the decorator form, a decorator.

    Example:
        @hcb.jit(donate_argnums=0)
        def step(state):
            return hcb.id_print(state + 1)
    """
    if fun is None:
        return functools.partial(jit, **jax_jit_kwargs)
    return _jax_jit(fun, **jax_jit_kwargs)
