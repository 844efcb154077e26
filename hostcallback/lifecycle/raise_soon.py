"""Makes the next call of a program with taps raise failed checks (`on_error="raise_soon"`).

JAX calls no code of this library when it calls such a program. So only while a failed check is pending, JAX calls a
hook after each call of a jitted function; the hook raises the check if that function has taps.
"""

from __future__ import annotations

import threading
from typing import Any

from hostcallback import _jax_compat as compat
from hostcallback.receiver.failures.deferred_errors import raise_soon_queue, watch_urgent
from hostcallback.receiver.runtime.runtime import runtime

_lock = threading.Lock()  # protects _unhook
_unhook: Any = None
_tapped: set[str] = set()  # names and source lines of functions whose programs have taps


def note_program(closed: Any) -> None:
    """Notes that the function from which a program was traced has taps."""
    name = compat.traced_function(closed)
    # Programs that are compiled ahead of time have no name: so have those of a barrier, which must not raise.
    if name is not None and name != compat.UNKNOWN_FUNCTION:
        _tapped.add(name)


def prepare() -> None:
    """Prepares the hook for failed checks.

    A thread other than the calling one that has used JAX before may not raise the checks; then a barrier raises them.
    """
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
    elif compat.source_of(function) in _tapped:
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
