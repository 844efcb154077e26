"""What was dispatched and may still run, from any thread, so that a barrier can wait for it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter, sleep
from typing import Any

import jax

from hostcallback import _jax_compat as compat
from receiver.deferred import urgent
from receiver.errors import TapTimeoutError
from receiver.runtime import runtime

PRUNE_ABOVE = 256
"""Results a thread notes before finished ones are dropped."""

DONATED = 0
"""The key of one donated result of a thread among its results; no sharding has that id."""


class _ThisThread(threading.local):
    """What the calling thread dispatched.

    Attributes:
        results: the last small result of its computations for each placement, by the id of its sharding (which lives
            as long as the result); `hostcallback.jit` adds to it. When one is ready, its computation is over, and so is
            everything the thread dispatched to the same devices before: on each, a thread's computations end in order.
        uses_effects: whether the thread dispatched taps through JAX's own effect path.
        looks_at_tokens: whether it looks at tokens now, which takes the hash of effects and dispatches nothing.
    """

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.uses_effects = False
        self.looks_at_tokens = False
        with _lock:
            _results[:] = [entry for entry in _results if not _is_over(*entry)]
            _results.append((threading.current_thread(), self.results))


# Per thread, not per thread id: ids are used again while the computations of an ended thread still run.
_lock = threading.Lock()  # protects the lists below (not each thread's results, which are its own)
_results: list[tuple[threading.Thread, dict[int, Any]]] = []
_tokens: list[tuple[threading.Thread, dict[str, Any]]] = []
_effects: list[Any] = []
_may_fail = False
_unordered = False

this_thread = _ThisThread()


def wait_for_effect(effect: Any) -> None:
    """Makes `wait` cover the computations that JAX dispatches with `effect`."""
    _effects.append(effect)


def prune(results: dict[int, Any]) -> None:
    """Drops finished results, which need not be waited on. Only the thread they belong to changes them.

    One that was donated stays, since what it was donated to may still run: see `_pending`.
    """
    for key, result in list(results.items()):
        if result.is_deleted():
            results[DONATED] = results.pop(key)
        elif _is_ready(result):
            del results[key]


def note_dispatching_thread() -> None:
    """Notes that the calling thread dispatches tapped computations through JAX's own effect path.

    What it dispatches next does not depend on one that failed: see `drop_failed_tokens`.
    """
    if urgent and compat.asks_for_token(sys._getframe(1)):
        raise_urgent()
    drop_failed_tokens()
    if not this_thread.uses_effects:
        this_thread.uses_effects = True
        with _lock:
            _tokens[:] = [entry for entry in _tokens if entry[0].is_alive() or not _tokens_are_over(entry[1])]
            _tokens.append((threading.current_thread(), compat.thread_tokens()))


def raise_urgent() -> None:
    """Raises the failed checks that are to be raised by the next call of a tapped program.

    Not on a receiver's threads: what tap functions dispatch is none of the user's calls.

    Raises:
        TapFunctionException: there are some.
    """
    if runtime.serves(threading.current_thread()):
        return
    while urgent:
        error = urgent.pop().take()
        if error is not None:
            raise error


def expect_failures() -> None:
    """Tells that computations with taps may fail from now on, since failing checks may end them."""
    global _may_fail
    _may_fail = True


def expect_unordered() -> None:
    """Tells that this process has taps from now on whose effect is not ordered."""
    global _unordered
    _unordered = True


def note_call() -> None:
    """Has the calling thread wait for the computations that it dispatched, the last of which has calls.

    XLA runs such a computation on the thread that dispatches it, but comes back as soon as it waits for its first call.
    If more were dispatched behind it, they could take the threads that its host function needs. And it may fail.
    """
    global _may_fail
    _may_fail = True
    if not this_thread.looks_at_tokens:
        compat.wait_for_runtime_tokens(compat.thread_tokens())


def drop_failed_tokens() -> None:
    """Makes the calling thread's next computation independent of its last one, should that have failed.

    JAX passes the token of a thread's last computation with taps on to the next one. If the first one failed, so would
    the next, all that follow it, and JAX's exit, with its error. Computations fail that have calls, and those that a
    check ends.
    """
    if _may_fail and not this_thread.looks_at_tokens:
        _drop_failed(_tokens_of_this_thread())


def _drop_failed(current: list[tuple[Any, Any]]) -> None:
    failed = [effect for effect, token in current if _is_ready(token) and not _has_succeeded(token)]
    if failed:
        with _looking_at_tokens():
            tokens = compat.thread_tokens()
            for effect in failed:
                compat.drop_token(tokens, effect)
            compat.drop_failed_runtime_tokens(tokens)


def _tokens_of_this_thread() -> list[tuple[Any, Any]]:
    tokens = compat.thread_tokens()
    with _looking_at_tokens():
        return [(effect, token) for effect in _effects for token in compat.ordered_tokens(tokens, effect)]


@contextlib.contextmanager
def _looking_at_tokens() -> Iterator[None]:
    looked, this_thread.looks_at_tokens = this_thread.looks_at_tokens, True
    try:
        yield
    finally:
        this_thread.looks_at_tokens = looked


def forget_failures() -> None:
    """Keeps JAX's barrier and its exit from raising what the calling thread's computations with taps failed with.

    For who has waited for them, and has reported that.
    """
    if _may_fail:
        _drop_failed(_tokens_of_this_thread())
        compat.drop_failed_runtime_tokens(compat.thread_tokens())


def _has_succeeded(result: Any) -> bool:
    try:
        result.block_until_ready()
    except Exception:
        return False
    return True


def wait(deadline: float | None, check: Callable[[], None]) -> None:
    """Waits for every computation with taps that any thread dispatched before this call.

    What a failed computation raises is not raised here: it belongs to whoever uses its results.

    Args:
        deadline: the `perf_counter()` value to give up at; None for never.
        check: called now and then while waiting; may raise to give up.

    Raises:
        TapTimeoutError: the deadline passed.
    """
    # Threads that had ended by now dispatch nothing more: once waited for, they can be forgotten.
    ended = {thread for thread, _ in [*_results, *_tokens] if not thread.is_alive()}
    pending = _pending()
    for index, result in enumerate(pending):
        _wait_one(result, deadline, check, len(pending) - index)
    if ended:
        with _lock:
            _results[:] = [entry for entry in _results if entry[0] not in ended]
            _tokens[:] = [entry for entry in _tokens if entry[0] not in ended]


def _pending() -> list[Any]:
    pending = [result for _, results in list(_results) for result in list(results.copy().values())]
    with _looking_at_tokens():
        for _, tokens in list(_tokens):
            for effect in _effects:
                pending += compat.ordered_tokens(tokens, effect)
            if _unordered:
                pending += compat.unordered_tokens(tokens)
    if any(result.is_deleted() for result in pending):
        # Donated to a program that need not be noted itself: it ends no sooner, and so do those that take its
        # results. Whatever such a chain has led to by now is among the live arrays.
        pending += jax.live_arrays()
    return pending


def _wait_one(result: Any, deadline: float | None, check: Callable[[], None], left: int) -> None:
    # Polled, not blocked on: blocking would shut out Ctrl-C and the deadline.
    pause = 20e-6
    while not _is_ready(result):
        check()
        if deadline is not None and perf_counter() > deadline:
            raise TapTimeoutError(
                f"{left} dispatched computation(s) with taps were still running when the time was up: give more "
                "time (timeout_sec=), or look for a computation that does not end"
            )
        sleep(pause)
        pause = min(2 * pause, 2e-3)


def _is_ready(result: Any) -> bool:
    try:
        return bool(result.is_deleted() or result.is_ready())
    except RuntimeError:  # deleted between the two calls, by another thread
        return True


def _tokens_are_over(tokens: dict[str, Any]) -> bool:
    with _looking_at_tokens():
        waited_on = [token for effect in _effects for token in compat.ordered_tokens(tokens, effect)]
    return not _unordered and all(map(_is_ready, waited_on))


def _is_over(thread: threading.Thread, results: dict[int, Any]) -> bool:
    return not thread.is_alive() and all(not r.is_deleted() and _is_ready(r) for r in results.values())


def forget() -> None:
    """Forgets everything: for a forked child, whose parent's computations do not exist."""
    global _lock
    _lock = threading.Lock()
    for _, results in _results:
        results.clear()
    _tokens.clear()
    this_thread.uses_effects = False
