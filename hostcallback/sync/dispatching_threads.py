"""Which threads may have dispatched programs since barriers last waited for all of them.

JAX dispatches without calling anything of ours. But only threads with a Python thread state dispatch, CPython numbers
these states as they are made, and `sys._current_frames` lists those that run: so it can be told whether a thread came
and went unseen. (A thread of another language that keeps its thread state for later calls is seen while it is in one.)
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import NamedTuple

_api = ctypes.pythonapi
_new = _api.PyThreadState_New
_new.argtypes, _new.restype = [ctypes.c_void_p], ctypes.c_void_p
_interpreter = _api.PyInterpreterState_Get
_interpreter.argtypes, _interpreter.restype = [], ctypes.c_void_p
_number = _api.PyThreadState_GetID
_number.argtypes, _number.restype = [ctypes.c_void_p], ctypes.c_uint64
_clear, _delete = _api.PyThreadState_Clear, _api.PyThreadState_Delete
_clear.argtypes = _delete.argtypes = [ctypes.c_void_p]
_clear.restype = _delete.restype = None


class Census(NamedTuple):
    """The threads of this process at one moment.

    Attributes:
        number: how many thread states have been made so far, this count's own ones among them.
        alive: `threading.get_ident` of the threads that run.
        suspects: those that may have dispatched programs that nobody has waited for, ended ones among them; None if
            there may be others, too.
    """

    number: int
    alive: frozenset[int]
    suspects: frozenset[int] | None


class DispatchingThreads:
    """Keeps track of threads from one barrier to the next. Any thread."""

    def __init__(self) -> None:
        """As if no thread had dispatched anything so far."""
        self._lock = threading.Lock()  # protects everything below
        self._number = _thread_states_made()
        self._known = frozenset(sys._current_frames())

    def count(self) -> Census:
        """The threads now, the calling one among them."""
        with self._lock:
            number, alive = _thread_states_made(), frozenset(sys._current_frames())
            if number - self._number - 1 != len(alive - self._known):
                return Census(number, alive, None)
            self._number, self._known = number, self._known | alive
            return Census(number, alive, self._known)

    def waited(self, census: Census) -> None:
        """Notes that all programs are over that any thread dispatched before that census."""
        with self._lock:
            if census.suspects is not None:
                self._known -= census.suspects - census.alive
            elif census.number > self._number:
                self._number, self._known = census.number, census.alive


def _thread_states_made() -> int:
    state = _new(_interpreter())
    number = int(_number(state))
    _clear(state)
    _delete(state)
    return number
