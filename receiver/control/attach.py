"""A process that attaches itself by the control socket, and shows what this one's taps print."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from receiver.control.errors import ControlError
from receiver.control.server import Connection
from receiver.log import logger
from receiver.messages.message import Consumer
from receiver.runtime.isolated.ring_handover import HandedOverRings
from receiver.runtime.runtime import Runtime
from receiver.sources.back_pressure import BackPressure, Policy


class AttachedReader:
    """What one attached process reads, until its connection ends. It never makes a device wait.

    Attributes:
        rings: what it reads.
    """

    def __init__(self, rings: HandedOverRings) -> None:
        """`rings` are handed over to it."""
        self.rings = rings

    def collect(self) -> None:
        """Nothing: what it delivers is for whoever started it."""


def attach(runtime: Runtime, arguments: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
    """Answers the command `attach`: the messages of taps that print go to the client from now on.

    Raises:
        ControlError: another process reads the rings already, or there are none that it could read.
    """
    rings = runtime.isolated.hand_over(None, BackPressure(policy=Policy.DROP_NEWEST))
    if rings is None:
        raise ControlError(
            "no device of this process has a ring that another process could read, or one reads them already: attach "
            "to programs whose taps run on CPU devices, on the native transport"
        )
    attachment = AttachedReader(rings)
    runtime.isolated.add(attachment)
    rings.route(runtime.registry, _is_printer)
    pid = connection.peer.pid if connection.peer is not None else 0
    logger.warning("process %d shows the messages of taps that print; detached, it gives them back", pid)

    def detach() -> None:
        rings.end()
        runtime.isolated.remove(attachment)

    # Not on the server's thread, which others wait for.
    connection.on_close.append(lambda: threading.Thread(target=detach, daemon=True).start())
    files = {name: str(file) for name, file in rings.files.items()}
    return {"pid": os.getpid(), "folder": str(rings.folder), "devices": files}


def _is_printer(consumer: Consumer) -> bool:
    return consumer.is_portable and not consumer.is_check
