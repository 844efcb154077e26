"""What was dispatched and may still run, from any thread, so that a barrier can wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

from hostcallback import _jax_compat as compat
from receiver.errors import TapTimeoutError
from receiver.log import logger

PRUNE_ABOVE = 256
"""Results kept before finished ones are dropped. JAX queues at most some tens of computations a device."""

_results: deque[Any] = deque()
_thread_tokens: dict[int, dict[str, Any]] = {}
_known = threading.local()
_effects: list[Any] = []


def wait_for_effect(effect: Any) -> None:
    """Makes `wait` cover the computations that JAX dispatches with `effect`."""
    _effects.append(effect)


def note_result(result: Any) -> None:
    """Notes a small result of a dispatched computation: when it is ready, the computation is over."""
    _results.append(result)
    if len(_results) > PRUNE_ABOVE:
        prune()


def prune() -> None:
    """Drops results of finished computations, oldest first."""
    while _results:
        result = _results[0]
        if not _is_ready(result):
            return
        try:
            _results.popleft()
        except IndexError:  # another thread pruned too
            return


def note_dispatching_thread() -> None:
    """Notes that the calling thread dispatches tapped computations through JAX's own effect path."""
    if not getattr(_known, "noted", False):
        _known.noted = True
        _thread_tokens[threading.get_ident()] = compat.thread_tokens()


def wait(deadline: float | None, check: Callable[[], None]) -> None:
    """Waits for every computation with taps that any thread dispatched before this call.

    What a failed computation raises is not raised here: it belongs to whoever uses its results.

    Args:
        deadline: the `perf_counter()` value to give up at; None for never.
        check: called now and then while waiting; may raise to give up.

    Raises:
        TapTimeoutError: the deadline passed.
    """
    pending = list(_results)
    for tokens in list(_thread_tokens.values()):
        for effect in _effects:
            pending += compat.tokens_of(tokens, effect)
    for index, result in enumerate(pending):
        _wait_one(result, deadline, check, len(pending) - index)
    prune()
    alive = {thread.ident for thread in threading.enumerate()}
    for ident in set(_thread_tokens) - alive:
        _thread_tokens.pop(ident, None)


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
        return bool(result.is_ready())
    except RuntimeError:
        # Donated to a later computation, which cannot end before this one and is noted itself; or failed.
        logger.debug("a dispatched computation's result cannot be waited for", exc_info=True)
        return True


def forget() -> None:
    """Forgets everything: for a forked child, whose parent's computations do not exist."""
    _results.clear()
    _thread_tokens.clear()
