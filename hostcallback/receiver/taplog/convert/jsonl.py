"""Converts to JSON lines: an object per message, as `hcb cat --json` writes them."""

from __future__ import annotations

import json
from typing import TextIO

from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostRun
from hostcallback.receiver.taplog.render.json import as_dict


class JsonlConversion:
    """Writes JSON lines."""

    def __init__(self, file: TextIO) -> None:
        """`file` stays open."""
        self._file = file

    def message(self, logged: LoggedMessage) -> None:
        """Writes a message as one line."""
        self._file.write(json.dumps(as_dict(logged), allow_nan=False) + "\n")

    def lost(self, run: LostRun) -> None:
        """Does nothing: lines are messages only."""

    def finish(self) -> None:
        """Does nothing: all lines are written."""
