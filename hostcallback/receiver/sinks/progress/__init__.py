"""Progress bars: the sink of their messages, the bars that are open, and the libraries that show them.

Sinks of many taps share the bars: a loop's first, later and last messages are different taps. The bars are in the
process that shows them, protected by one lock; receiver threads of all devices move them.
"""

from __future__ import annotations

from typing import Protocol


class OpenBars(Protocol):
    """The bars of this process, for those that wait for its taps."""

    def close_all(self) -> None:
        """Closes all bars: their programs have ended, failed or were aborted."""

    def write_lines(self) -> None:
        """Writes the last step of the bars that are lines, at the end of the process."""


shown: list[OpenBars] = []
"""Has the bars once their module is imported, which the first sink of a bar does."""
