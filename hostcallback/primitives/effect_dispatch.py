"""What happens around JAX's dispatch of effects: without fast dispatch, and for `on_error="raise_soon"`.

Fast dispatch is off if the user turns it off or this JAX version is not known. JAX then passes the token of a
thread's last program with an effect to the next one. If that program failed, the next program, all later ones and
JAX's exit would fail with its error. Programs can fail if they have calls or if a failed check ends them.

JAX calls no code of this library when it calls a program with taps. So only while a failed check is pending, JAX
calls a hook after each call of a jitted function; the hook raises the check if that function has taps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.primitives import effects
from hostcallback.receiver.failures.deferred_errors import raise_soon_queue, watch_urgent
from hostcallback.receiver.runtime.runtime import runtime

_lock = threading.Lock()  # protects _unhook
_unhook: Any = None


def prepare() -> None:
    """Prepares the hook for failed checks.

    A thread other than the calling one that has used JAX before may not raise the checks; then a barrier raises them.
    """
    effects.before_dispatch = _before_dispatch
    compat.let_threads_have_the_hook()


def raise_now() -> None:
    """Raises the pending failed checks.

    Does nothing on the threads of receivers, because dispatches of tap functions are not calls of the user.

    Raises:
        TapFunctionException: has the failed checks, if any.
    """
    # A tap function that runs a program would get the error of another tap's check.
    if runtime.serves(threading.current_thread()):
        return
    while raise_soon_queue:
        try:
            pending = raise_soon_queue.pop()
        except IndexError:  # another thread took the last one between the look and this
            return
        error = pending.take()
        if error is not None:
            raise error


def _after_call(function: Any) -> None:
    # The hook costs each call some time, so it goes once nothing is left to raise.
    if not raise_soon_queue:
        _hook(False)
    elif compat.source_of(function) in effects.tapped_functions:
        raise_now()


def _hook(on: bool) -> None:
    global _unhook
    with _lock:
        if on and (_unhook is None or not compat.is_hooked(_unhook)):
            _unhook = compat.call_after_each_jit(_after_call)
        # Asked again under the lock: a check may have failed since, and its hook must stay.
        elif not on and not raise_soon_queue and _unhook is not None:
            _unhook()
            _unhook = None


watch_urgent(lambda: _hook(True))


_may_fail = False


class _ThisThread(threading.local):
    looks_at_tokens = False  # True while this module reads tokens, which hashes effects without a dispatch


_this_thread = _ThisThread()


def expect_failures() -> None:
    """Notes that programs with taps may fail from now on, because failed checks may end them."""
    global _may_fail
    _may_fail = True
    effects.before_dispatch = _before_dispatch
    effects.forget_failures = _forget_failures


def _before_dispatch() -> None:
    # Raises the failed checks that the next call must raise, and drops failed tokens.
    # The queue first: it is empty in almost every dispatch, and the look at the stack costs more.
    if raise_soon_queue and compat.asks_for_token(sys._getframe(1)):
        raise_now()
    if _may_fail and not _this_thread.looks_at_tokens:
        _drop_failed_tokens()


def _before_call() -> None:
    # Waits for earlier programs of the calling thread. XLA runs a program with calls on the dispatching thread, but
    # returns as soon as it waits for its first call. If programs were dispatched behind it, they could take the threads
    # that its host function needs. The program may also fail.
    expect_failures()
    if not _this_thread.looks_at_tokens:
        compat.wait_for_runtime_tokens(compat.thread_tokens())


def _forget_failures() -> None:
    # Keeps JAX's barrier and its exit from raising errors of the calling thread's programs with taps.
    _drop_failed_tokens()
    compat.drop_failed_runtime_tokens(compat.thread_tokens())


effects.before_call = _before_call
_WITH_TOKENS = (effects.TAP_EFFECT, effects.CALL_EFFECT)


def _drop_failed_tokens() -> None:
    tokens = compat.thread_tokens()
    # Tracing and lowering a tap hash its effects about twenty times; with fast dispatch there is no token.
    if not compat.has_ordered_tokens(tokens):
        return
    with _looking_at_tokens():
        current = [
            (effect, token) for effect in _WITH_TOKENS for token in compat.ordered_tokens(tokens, effect)
        ]
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
        token.block_until_ready()  # of a ready token this does not wait; it is the only way to get the error
    # Any error: the programs may be of the user's, and what counts is only that the token must not be used
    # again.
    except Exception:
        return True
    return False
