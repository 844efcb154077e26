"""Runs the parts of a test on several threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(work: Callable[[int], None], count: int) -> None:
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
