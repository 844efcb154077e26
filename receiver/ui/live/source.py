"""What the page needs of running processes, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class LiveProcess(NamedTuple):
    """A process that answered.

    Attributes:
        host: name of its machine.
        pid: its process id there.
        run: name of its run; empty if unknown.
        figures: its answer to the command `figures`, see `hostcallback.receiver.control.commands`.
    """

    host: str
    pid: int
    run: str
    figures: dict[str, Any]


class LiveSource(Protocol):
    """Running processes. One thread at a time."""

    kind: str
    name: str

    def logs(self) -> list[Path]:
        """Folders with the tap logs of the processes."""

    def ask(self) -> list[LiveProcess]:
        """Asks all processes for their metrics.

        Raises:
            HostCallbackError: none can be reached; the text says why.
        """

    def set_rules(self, pattern: str, settings: Mapping[str, Any], run: str, *, reset: bool) -> list[str]:
        """Sets rules of taps, and returns the names of these taps.

        Raises:
            HostCallbackError: they cannot be set; the text says why.
        """

    def rest(self) -> None:
        """Is called when no page is open: lets the processes stop counting."""

    def close(self) -> None:
        """Ends all connections."""


def is_process(found: Any) -> bool:
    """Whether an answer, which comes from outside this process, has what the page shows."""
    try:
        numbers = [found["time"], *(tap[name] for tap in found["taps"] for name in TAP_NUMBERS)]
        numbers += [device[name] for device in found["devices"] for name in DEVICE_NUMBERS]
        texts = [device["device"] for device in found["devices"]]
        texts += [tap[name] for tap in found["taps"] for name in ("name", "source_line", "rules")]
    except (LookupError, TypeError):
        return False
    return all(type(number) in (int, float) for number in numbers) and all(
        type(item) is str for item in texts
    )


TAP_NUMBERS = "messages", "bytes", "failed", "tap_sec", "suppressed"
DEVICE_NUMBERS = "emitted", "dropped", "queued", "queued_bytes", "waiting"
