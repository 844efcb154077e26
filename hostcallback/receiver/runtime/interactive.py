"""Shows failures of taps in notebooks, in IPython and at Python's prompt, where no end of a program reports them."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from typing import Any

from hostcallback.receiver import processes
from hostcallback.receiver.failures.deferred_errors import watch_failures
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.text import say

HEADLINE = "hostcallback: tap functions raised. barrier_wait() raises this report:"


class _Prompt(str):
    """A Python prompt (`sys.ps1`) that prints new failures before it is shown."""

    __slots__ = ()

    def __str__(self) -> str:
        # Python converts `sys.ps1` to text each time it shows the prompt: the only hook that the plain prompt
        # offers.
        show_new_failures()
        return str.__str__(self)


class _Shown:
    """The failures shown so far, and the places that will show more."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # protects everything below
        self.watched: Any = None
        self.counts: weakref.WeakKeyDictionary[Scope, int] = weakref.WeakKeyDictionary()


_shown = _Shown()


def show_new_failures(*_: Any) -> None:
    """Prints a report if taps have raised since the last one. The failures stay for the next barrier."""
    for scope in runtime.current_scopes():
        failed = scope.deferred.failed()
        with _shown.lock:
            before, _shown.counts[scope] = _shown.counts.get(scope, 0), failed
        report = scope.deferred.peek() if failed > before else None
        if report is not None:
            say(HEADLINE)
            traceback.print_exception(report)


def _watch_prompt() -> None:
    # Called on a receiver thread after a failure. A program that is not interactive reports it at its end.
    shell = _ipython_shell()
    with _shown.lock:
        if shell is not None:
            if _shown.watched is not shell:
                _shown.watched = shell
                # Failures between two cells are shown by the next cell, before it runs.
                shell.events.register("pre_run_cell", show_new_failures)
                shell.events.register("post_run_cell", show_new_failures)
        elif sys.flags.interactive or hasattr(sys, "ps1"):
            prompt = getattr(sys, "ps1", ">>> ")
            if type(prompt) is str:
                sys.ps1 = _Prompt(prompt)


def _ipython_shell() -> Any:
    # Not imported: importing IPython takes long, and where it is not imported, no shell of it runs.
    shells = sys.modules.get("IPython.core.interactiveshell")
    return None if shells is None else getattr(shells.InteractiveShell, "_instance", None)


def _forget() -> None:
    global _shown
    _shown = _Shown()


watch_failures(_watch_prompt)
processes.in_child(processes.Stage.PROGRAM, _forget)
