"""The protocol of control sockets: one JSON object per line, a request and then its response, any number of them.

{"version": 1, "command": "rules", "arguments": {...}}
{"version": 1, "result": ...}  or  {"version": 1, "error": "text for people", "kind": "NoSuchTapError"}
"""

from __future__ import annotations

import json
from typing import Any

from hostcallback.receiver.control.errors import ControlError

VERSION = 1
MAX_REQUEST = 64 << 10
MAX_RESPONSE = 16 << 20


def pack(message: dict[str, Any]) -> bytes:
    """Encodes a message as one line."""
    return json.dumps({"version": VERSION, **message}).encode() + b"\n"


def unpack(line: bytes) -> dict[str, Any]:
    """Decodes one line.

    Raises:
        ControlError: the line is not a JSON object, or of another protocol version.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"{line[:40]!r} is not JSON: {error}") from error
    if not isinstance(message, dict) or message.get("version") != VERSION:
        raise ControlError(
            f"{line[:40]!r} is not of version {VERSION} of the control protocol: use the hcb command of the "
            "hostcallback version that the process runs"
        )
    return message
