"""Shared by tests of `watch_nonfinite`: running a program, and its reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostcallback as hcb


def errors_of(run: Callable[[], Any]) -> list[hcb.NonFiniteError]:
    """Runs a program and waits; returns its reports in order of delivery."""
    try:
        with hcb.outfeed_receiver():
            run()
    except hcb.TapFunctionException as group:
        return list(_flat(group))
    return []


def _flat(group: BaseExceptionGroup[Any]) -> Iterator[Any]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flat(error)
        else:
            yield error


def call(number: int) -> int | None:
    """The number of a call in reports: on the callback transport nothing counts them."""
    return number if os.environ.get("HOSTCALLBACK_TRANSPORT", "native") == "native" else None


def line_of(file: str, mark: str) -> int:
    """The number of the one line of a file that ends in the comment `# <mark>`."""
    (number,) = [
        i for i, line in enumerate(Path(file).read_text().splitlines(), 1) if line.endswith(f"# {mark}")
    ]
    return number
