"""The protocol of control sockets: JSON lines, a request and then its response; its errors, and who answers.

{"version": 1, "command": "rules", "arguments": {...}}
{"version": 1, "result": ...}  or  {"version": 1, "error": "text for people", "kind": "NoSuchTapError"}

ControlError             a request that cannot be fulfilled
|-- RuleFileError        a rule file with invalid content
|-- ControlSocketError   a process that cannot be reached, must not be trusted, or cannot open its socket
`-- NoSuchTapError       a glob that matches no tap
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.log import logger


class ControlError(HostCallbackError):
    """A user asked live control for something that it cannot do."""


class RuleFileError(ControlError):
    """The content of a rule file is invalid; the text names the line and the cure.

    Example:
        pathlib.Path("wrong.toml").write_text("[loss]\\nevery = 0\\n")
        try:
            hcb.control_file("wrong.toml")
        except hcb.RuleFileError as error:
            print(error)
    """


class ControlSocketError(ControlError):
    """A process's control socket cannot be created, reached or trusted."""


class NoSuchTapError(ControlError):
    """A glob matches no tap of a process."""


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


class Client:
    """The client of a request, as long as it is connected.

    Attributes:
        on_close: called when the client has disconnected, on the thread that answered it.
    """

    def __init__(self) -> None:
        """A client that has just connected."""
        self.on_close: list[Callable[[], None]] = []

    def closed(self) -> None:
        """Calls the callbacks of `on_close`: the client has disconnected."""
        for callback in self.on_close:
            callback()


Handler = Callable[[dict[str, Any], Any], Any]
"""Answers one command: maps its arguments and the `Client` to a result that JSON can represent. The calling thread
serves no other client meanwhile. The client receives the text of a HostCallbackError or ValueError that it raises."""


def handle_request(handlers: Mapping[str, Handler], line: bytes, client: Client) -> bytes:
    """Returns the response to a request, both as lines of `hostcallback.receiver.control.protocol`.

    Raises:
        OSError: the client has disconnected.
    """
    try:
        request = unpack(line)
        command, arguments = request.get("command"), request.get("arguments", {})
        handler = handlers.get(command) if isinstance(command, str) else None
        if handler is None or not isinstance(arguments, dict):
            known = ", ".join(sorted(handlers))
            raise ControlError(f"this process has no command {command!r}, only {known}")
        return pack({"result": handler(arguments, client)})
    except OSError:  # the connection is broken, so a response could not be sent
        raise
    # A client's mistake must not end the thread that serves all clients.
    except Exception as error:
        if not isinstance(error, HostCallbackError | ValueError):
            logger.exception("a control request failed")
        text = str(error) or type(error).__name__
        return pack({"error": text, "kind": type(error).__name__})
