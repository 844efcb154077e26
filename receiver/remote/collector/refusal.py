"""How a collector sends a client away: with a status, and a text that says why."""

from __future__ import annotations

from typing import Any

import grpc

Code = grpc.StatusCode


class Refused(Exception):
    """A call is ended with a status.

    Attributes:
        code: the status.
    """

    def __init__(self, code: Any, text: str) -> None:
        """`text` is for the client's user, and for the collector's log."""
        super().__init__(text)
        self.code = code
