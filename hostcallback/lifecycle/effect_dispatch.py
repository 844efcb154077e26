"""What has to be done where JAX itself dispatches taps as effects: with fast dispatch off, in a JAX not known to it.

JAX passes the token of a thread's last program with an effect on to the next one. If the first one failed, so would the
next, all that follow it, and JAX's exit, with its error. Programs fail that have calls, and those that a check ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.lifecycle import raise_soon
from hostcallback.receiver.messages.deferred_errors import raise_soon_queue

_effects: list[Any] = []
_may_fail = False


class _ThisThread(threading.local):
    looks_at_tokens = False  # which takes the hash of effects and dispatches nothing


_this_thread = _ThisThread()


def register(effect: Any) -> None:
    """Tells of an effect that JAX threads tokens for."""
    _effects.append(effect)


def expect_failures() -> None:
    """Tells that programs with taps may fail from now on, since failing checks may end them."""
    global _may_fail
    _may_fail = True


def before_dispatch() -> None:
    """What an effect's hash does, which JAX takes whenever it dispatches a program with it, and at other times.

    Raises:
        TapFunctionException: checks have failed that the next call is to raise.
    """
    if raise_soon_queue and compat.asks_for_token(sys._getframe(1)):
        raise_soon.raise_now()
    if _may_fail and not _this_thread.looks_at_tokens:
        _drop_failed_tokens()


def before_call() -> None:
    """As `before_dispatch`, of programs with calls: waits for what the calling thread dispatched.

    XLA runs such a program on the thread that dispatches it, but comes back as soon as it waits for its first call. If
    more were dispatched behind it, they could take the threads that its host function needs. And it may fail.
    """
    expect_failures()
    if not _this_thread.looks_at_tokens:
        compat.wait_for_runtime_tokens(compat.thread_tokens())


def forget_failures() -> None:
    """Keeps JAX's barrier and its exit from raising what the calling thread's programs with taps failed with.

    For who has waited for them, and has reported that.
    """
    if _may_fail:
        _drop_failed_tokens()
        compat.drop_failed_runtime_tokens(compat.thread_tokens())


def _drop_failed_tokens() -> None:
    tokens = compat.thread_tokens()
    with _looking_at_tokens():
        current = [(effect, token) for effect in _effects for token in compat.ordered_tokens(tokens, effect)]
        failed = [effect for effect, token in current if _has_failed(token)]
        for effect in failed:
            compat.drop_token(tokens, effect)
        if failed:
            compat.drop_failed_runtime_tokens(tokens)


@contextlib.contextmanager
def _looking_at_tokens() -> Iterator[None]:
    looked, _this_thread.looks_at_tokens = _this_thread.looks_at_tokens, True
    try:
        yield
    finally:
        _this_thread.looks_at_tokens = looked


def _has_failed(token: Any) -> bool:
    if token.is_deleted() or not token.is_ready():
        return False
    try:
        token.block_until_ready()
    except Exception:
        return True
    return False
