"""Answers control requests of every endpoint: finds the command's handler, and turns its errors into responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hostcallback.receiver.control import protocol
from hostcallback.receiver.control.errors import ControlError
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.log import logger


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
        request = protocol.unpack(line)
        command, arguments = request.get("command"), request.get("arguments", {})
        handler = handlers.get(command) if isinstance(command, str) else None
        if handler is None or not isinstance(arguments, dict):
            known = ", ".join(sorted(handlers))
            raise ControlError(f"this process has no command {command!r}, only {known}")
        return protocol.pack({"result": handler(arguments, client)})
    except OSError:  # the connection is broken, so a response could not be sent
        raise
    # A client's mistake must not end the thread that serves all clients.
    except Exception as error:
        if not isinstance(error, HostCallbackError | ValueError):
            logger.exception("a control request failed")
        text = str(error) or type(error).__name__
        return protocol.pack({"error": text, "kind": type(error).__name__})
