"""A simulated user at the debugger's prompt: types the commands of a script and records the answers."""

from __future__ import annotations

import re
import threading
from typing import Any

PROMPT = "(hcb) "


class Script:
    """For the `stdin=` and the `stdout=` of a breakpoint, both.

    Attributes:
        threads: the thread of each read or write.
    """

    def __init__(self, *commands: str) -> None:
        """Types `commands`, one at each prompt; the input ends after them, which quits."""
        self.commands = list(commands)
        self.text = ""
        self.threads: list[threading.Thread] = []

    def readline(self) -> str:
        self.threads.append(threading.current_thread())
        return self.commands.pop(0) + "\n" if self.commands else ""

    def write(self, text: str) -> int:
        self.threads.append(threading.current_thread())
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def streams(self) -> dict[str, Any]:
        """The keyword arguments of a breakpoint that this script is for."""
        return {"stdin": self, "stdout": self}

    @property
    def answers(self) -> list[str]:
        """Text printed after each command, up to the next prompt or stop."""
        answers = self.text.split(PROMPT)[1:]
        return [answer.partition("hostcallback: stop ")[0].strip("\n") for answer in answers]

    @property
    def stops(self) -> list[str]:
        """The line that begins each stop."""
        return re.findall(r"hostcallback: (stop .*)", self.text)
