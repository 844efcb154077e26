"""`checked`: wraps a step so that it raises the failures of its checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from hostcallback import _jax_compat as compat
from hostcallback.api.barrier import wait_for_taps
from hostcallback.api.public import public
from hostcallback.receiver.errors import TapFunctionException
from hostcallback.receiver.runtime.runtime import runtime

P = ParamSpec("P")
R = TypeVar("R")


@public
def checked(step: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls `step` and raises if a check in it failed.

    Each call waits for the device: it returns when the results are ready and all emitted messages are delivered. If a
    check failed, the results are dropped, and donated arguments of `step` are gone. Failed checks of other threads
    during the call count as failures of `step`. Earlier failures stay for the next barrier.

    Args:
        step: a compiled function: of `hostcallback.jit`, `jax.jit`, `jax.pmap` or around a `jax.shard_map`.

    Returns:
        The function, which raises TapFunctionException with one `CheckError` per line with failed checks, the first
        failure first. (Also if `on_error="abort"` ended the program.)

    Raises:
        TypeError: `step` is not callable.

    Example:
        step = hcb.checked(hcb.jit(train_step, donate_argnums=0))
    """
    if not callable(step):
        raise TypeError(
            f"hcb.checked takes a function, got {type(step).__name__} {step!r}: hcb.checked(step)"
        )

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compat.outside_traces():
            return step(*args, **kwargs)
        wait_for_taps()
        before = [(scope.deferred, scope.deferred.take_checks()) for scope in runtime.scopes()]
        try:
            try:
                out = step(*args, **kwargs)
                jax.block_until_ready(out)
            except jax.errors.JaxRuntimeError as error:
                wait_for_taps()
                _raise_failed_checks(error)
                raise
            wait_for_taps()
            _raise_failed_checks(None)
            return out
        finally:
            for deferred, checks in before:
                deferred.put_back(checks)

    return call


def _raise_failed_checks(cause: BaseException | None) -> None:
    found = [checks for scope in runtime.scopes() if (checks := scope.deferred.take_checks())]
    if found:
        checks = found[0]
        for more in found[1:]:
            checks.merge(more)
        raise TapFunctionException(checks.headline(), checks.errors()) from cause
