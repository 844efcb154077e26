"""A terminal screen whose text is replaced repeatedly, drawn by the package rich if it is installed."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator

from hostcallback.receiver.terminal import printable

Show = Callable[[list[str]], None]


@contextlib.contextmanager
def live_screen() -> Iterator[Show]:
    """Yields a function that replaces the text on the terminal; the terminal is restored afterwards."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        with _plain_screen() as show:
            yield show
        return
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(lines: list[str]) -> None:
            text = Text("\n".join(_fitting(lines)), no_wrap=True, overflow="crop")
            for index, line in enumerate(lines):
                if line.startswith(("device ", "tap ")):
                    # The text is cropped by `_fitting`, so the places count cropped lines.
                    start = sum(len(earlier[: console.width]) + 1 for earlier in lines[:index])
                    text.stylize("bold", start, start + len(line))
            live.update(text, refresh=True)

        yield show


@contextlib.contextmanager
def _plain_screen() -> Iterator[Show]:
    print("(for a screen without flicker: pip install 'hostcallback[top]')", file=sys.stderr)

    def show(lines: list[str]) -> None:
        # Moves home and overwrites each line up to its end: clearing the screen first would flicker.
        text = "".join(f"{line}\x1b[K\n" for line in _fitting(lines))
        sys.stdout.write(f"\x1b[H{text}\x1b[J")
        sys.stdout.flush()

    sys.stdout.write("\x1b[2J")
    yield show


def _fitting(lines: list[str]) -> list[str]:
    size = shutil.get_terminal_size()
    shown = [printable(line)[: size.columns] for line in lines[: size.lines - 1]]
    if len(lines) > len(shown):
        shown[-1] = f"... {len(lines) - len(shown) + 1} more lines"[: size.columns]
    return shown
