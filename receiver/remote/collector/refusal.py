"""The error with which a collector refuses a client: a gRPC status, and the reason as text."""

from __future__ import annotations

from typing import Any

import grpc

Code = grpc.StatusCode


class Refused(Exception):
    """Ends a call with a status.

    Attributes:
        code: the gRPC status.
    """

    def __init__(self, code: Any, text: str) -> None:
        """`text` is for the client's user, and for the collector's log."""
        super().__init__(text)
        self.code = code
