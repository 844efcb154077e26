"""Running processes for tests of the page: sources whose answers a test gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hostcallback.receiver.control.protocol import ControlError
from hostcallback.receiver.ui.live.source import DEVICE_NUMBERS, TAP_NUMBERS, LiveProcess


def tap(name: str = "loss", line: str = "a.py:1", **fields: Any) -> dict[str, Any]:
    """What a process tells of one of its taps."""
    return {"name": name, "source_line": line, "rules": "", **dict.fromkeys(TAP_NUMBERS, 1), **fields}


def device(name: str = "cpu:0", **fields: Any) -> dict[str, Any]:
    """What a process tells of one of its devices."""
    return {"device": name, **dict.fromkeys(DEVICE_NUMBERS, 0), **fields}


def figures(at: float, *devices: dict[str, Any], taps: Any = (), **fields: Any) -> dict[str, Any]:
    """What a process tells of itself at a time."""
    return {"time": at, "devices": list(devices), "taps": list(taps), **fields}


def process(found: dict[str, Any], pid: int = 7, run: str = "one") -> LiveProcess:
    """A process on the machine `host` that has told that."""
    return LiveProcess("host", pid, run, found)


class Source:
    """A source that gives the next of its answers to each question, the last one again and again.

    Attributes:
        asked: how often it was asked.
        told: the commands that it got, with their runs and arguments.
        answer: the results of each command, or the error that it raises.
        rests: how often its connection was closed for a while.
        closed: whether it was closed for good.
        ended: whether its process has ended.
    """

    kind = "process"

    def __init__(self, *answers: Any, name: str = "7: train.py", answer: Any = (), folder: Any = ()) -> None:
        self.name = name
        self.answer = answer
        self.asked, self.rests, self.closed, self.ended = 0, 0, False, False
        self.told: list[Any] = []
        self._answers = list(answers)
        self._folder = folder

    def logs(self) -> list[Path]:
        return list(self._folder)

    def ask(self) -> list[LiveProcess]:
        self.asked += 1
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(found, Exception):
            raise found
        return list(found)

    def tell(self, command: str, run: str, **arguments: Any) -> list[Any]:
        self.told.append((command, run, arguments))
        if isinstance(self.answer, ControlError):
            raise self.answer
        return list(self.answer)

    def has_ended(self) -> bool:
        return self.ended

    def rest(self) -> None:
        self.rests += 1

    def close(self) -> None:
        self.closed = True
