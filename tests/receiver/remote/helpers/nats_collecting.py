"""Collectors that fetch from NATS, in separate processes, and their stored messages."""

from __future__ import annotations

from pathlib import Path

from collecting import CollectorProcess, stored
from hostcallback.receiver.errors import NotATapLogError
from hostcallback.receiver.taplog.reading.reader import LogReader


class NatsCollectorProcess(CollectorProcess):
    """`hcb collect --nats`."""

    def __init__(self, folder: Path, url: str, *arguments: str) -> None:
        self.url = url
        super().__init__(folder, *arguments)

    def command(self) -> list[str]:
        return ["--nats", self.url, "--log", str(self.log)]


def all_messages(*logs: Path) -> list[int]:
    """The numbers of the messages in several collectors' logs, per log."""
    found: list[int] = []
    for log in logs:
        try:
            numbers, _ = stored(log)
        except (NotATapLogError, FileNotFoundError):  # it has just begun
            continue
        found += [seq for seqs in numbers.values() for seq in seqs]
    return sorted(found)


def read_together(*logs: Path) -> list[int]:
    """The numbers of the messages in several collectors' logs, in the order in which a command shows them."""
    try:
        reader = LogReader([log / "run" for log in logs if any((log / "run").glob("*.hcblog"))])
    except (NotATapLogError, FileNotFoundError):
        return []
    return [item.message.seq for item in reader.messages()]
