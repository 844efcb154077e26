"""Bars on the screen, by tqdm and by rich, behind one interface."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Display(Protocol):
    """One bar on the screen. The caller has a lock."""

    def show(self, step: int, total: int | None, postfix: str) -> None:
        """Moves the bar."""

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""

    def reset(self) -> None:
        """Starts the bar again at step 0, with a new clock."""

    def clear(self) -> None:
        """Removes the bar from the screen until it is closed."""

    def close(self, *, leave: bool) -> None:
        """Leaves the bar as it is, or removes it."""


@contextlib.contextmanager
def above_bars() -> Iterator[None]:
    """Removes the bars of tqdm from a terminal while text is written to the standard output.

    rich does that by itself.
    """
    from tqdm import tqdm

    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield
        return
    with tqdm.external_write_mode():
        yield
        sys.stdout.flush()


class TqdmDisplay:
    """A bar of `tqdm.auto`: text in a terminal, a widget in a notebook."""

    def __init__(self, desc: str, unit: str) -> None:
        """Shows the bar at step 0."""
        from tqdm.auto import tqdm

        # Messages come ten times a second, and the last one must be shown: tqdm leaves none out.
        self._bar = tqdm(
            desc=desc or None, unit=unit, leave=True, mininterval=0, miniters=0, dynamic_ncols=True
        )

    def show(self, step: int, total: int | None, postfix: str) -> None:
        """Moves the bar."""
        bar = self._bar
        if total != bar.total:
            bar.total = total
        bar.set_postfix_str(postfix, refresh=False)
        bar.update(step - bar.n)  # also by 0, which shows the bar as well

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""
        self._bar.set_description_str(f"{desc}: " if desc else "")

    def reset(self) -> None:
        """Starts the bar again."""
        self._bar.reset()

    def clear(self) -> None:
        """Removes the bar for now."""
        self._bar.clear()

    def close(self, *, leave: bool) -> None:
        """Leaves or removes the bar."""
        self._bar.leave = leave
        self._bar.close()


class RichDisplay:
    """A bar of `rich.progress`. All bars share one live display, which ends with the last of them."""

    _shared: Any = None
    _open = 0

    def __init__(self, desc: str, unit: str) -> None:
        """Shows the bar at step 0."""
        if RichDisplay._shared is None:
            RichDisplay._shared = _rich_progress()
            RichDisplay._shared.start()
        RichDisplay._open += 1
        self._task = RichDisplay._shared.add_task(desc or "progress", total=None, unit=unit, postfix="")

    def show(self, step: int, total: int | None, postfix: str) -> None:
        """Moves the bar."""
        self._shared.update(self._task, completed=step, total=total, postfix=postfix)

    def label(self, desc: str) -> None:
        """Sets the text before the bar."""
        self._shared.update(self._task, description=desc)

    def reset(self) -> None:
        """Starts the bar again."""
        self._shared.reset(self._task)

    def clear(self) -> None:
        """Does nothing: rich draws all bars at once."""

    def close(self, *, leave: bool) -> None:
        """Leaves or removes the bar."""
        shared = RichDisplay._shared
        if not leave:
            shared.remove_task(self._task)
        else:
            shared.stop_task(self._task)
        RichDisplay._open -= 1
        if not RichDisplay._open:
            shared.stop()
            RichDisplay._shared = None


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[postfix]}", markup=False),
        console=Console(stderr=True),
    )  # fmt: skip


DISPLAYS: dict[str, Callable[..., Display]] = {"tqdm": TqdmDisplay, "rich": RichDisplay}
"""The displays by name."""
