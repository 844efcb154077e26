"""Answers requests of control: finds the command's handler, and says what went wrong. Whichever way a request came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from receiver.control import protocol
from receiver.control.errors import ControlError
from receiver.errors import HostCallbackError
from receiver.log import logger


class Client:
    """Whoever asks, for as long as it is connected.

    Attributes:
        on_close: called when the client is gone, on the thread that answered it.
    """

    def __init__(self) -> None:
        """It has just come."""
        self.on_close: list[Callable[[], None]] = []

    def closed(self) -> None:
        """It is gone."""
        for callback in self.on_close:
            callback()


Handler = Callable[[dict[str, Any], Any], Any]
"""Answers one command: from its arguments and the `Client` to what that gets, as JSON has it. On a thread that serves
nobody else meanwhile. A HostCallbackError or ValueError that it raises is the client's to read."""


def handle_request(handlers: Mapping[str, Handler], line: bytes, client: Client) -> bytes:
    """The response to a request, both as lines of `receiver.control.protocol`.

    Raises:
        OSError: the client is gone.
    """
    try:
        request = protocol.unpack(line)
        command, arguments = request.get("command"), request.get("arguments", {})
        handler = handlers.get(command) if isinstance(command, str) else None
        if handler is None or not isinstance(arguments, dict):
            known = ", ".join(sorted(handlers))
            raise ControlError(f"this process has no command {command!r}, only {known}")
        return protocol.pack({"result": handler(arguments, client)})
    except OSError:
        raise
    except Exception as error:
        if not isinstance(error, HostCallbackError | ValueError):
            logger.exception("a request of control failed")
        text = str(error) or type(error).__name__
        return protocol.pack({"error": text, "kind": type(error).__name__})
