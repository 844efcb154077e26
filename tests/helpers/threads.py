"""Runs the parts of a test on several threads at the same time, and waits for what others do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_SEC = 60.0


def in_threads(work: Callable[[int], object], count: int) -> None:
    """Runs `work(number)` in that many threads at once and waits for them; raises their errors."""
    together = threading.Barrier(count)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            together.wait(30)
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def in_another_thread(work: Callable[[], object]) -> None:
    """Runs `work()` in a thread and waits for it; raises its error."""
    in_threads(lambda _: work(), 1)


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in another thread, and returns its result: the browser of other tests has a loop in this one."""
    results: list[T] = []
    in_another_thread(lambda: results.append(asyncio.run(coroutine)))
    return results[0]


def wait_for(condition: Callable[[], Any], what: str = "it", timeout_sec: float = WAIT_SEC) -> Any:
    """Waits until the condition holds, and returns what it found."""
    deadline = time.monotonic() + timeout_sec
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout_sec} s"
        pause.wait(0.01)
    return found
