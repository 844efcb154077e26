"""The command `attach`: a client process reads the rings of this process and prints the messages of its taps."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from hostcallback.receiver.control.protocol import ControlError
from hostcallback.receiver.control.server import Connection
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.runtime.isolated.ring_handover import HandedOverRings
from hostcallback.receiver.runtime.runtime import Runtime
from hostcallback.receiver.sources.back_pressure import BackPressure, Policy


class AttachedReader:
    """The rings that one attached process reads until its connection ends.

    Messages for which these rings have no room are dropped, so an attached process never makes a device wait.

    Attributes:
        rings: rings that were handed over to the attached process.
    """

    def __init__(self, rings: HandedOverRings) -> None:
        """`rings` are handed over to the attached process already."""
        self.rings = rings

    def collect(self) -> None:
        """Does nothing: the user who started the attached process sees its output, this process needs none of it."""


def attach(runtime: Runtime, arguments: Mapping[str, Any], connection: Connection) -> dict[str, Any]:
    """Answers the command `attach`: from now on the client receives the messages of taps that print.

    Args:
        runtime: whose rings the client reads.
        arguments: of the command; it takes none.
        connection: the client; the rings are taken back when it closes.

    Returns:
        The process id, the folder of the rings, and the ring file of each device, by the device's name.

    Raises:
        ControlError: another process reads the rings already, or no device has a ring that a process could read.
    """
    # DROP_NEWEST: a client that is stopped, or slow, must not hold the program up.
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
    logger.warning(
        "process %d now shows the messages of taps that print; they come back when it detaches", pid
    )

    def detach() -> None:
        rings.end()
        runtime.isolated.remove(attachment)

    # `rings.end` may take long. On the server's only thread it would make every other client wait.
    connection.on_close.append(lambda: threading.Thread(target=detach, daemon=True).start())
    files = {name: str(file) for name, file in rings.files.items()}
    return {"pid": os.getpid(), "folder": str(rings.folder), "devices": files}


def _is_printer(consumer: Consumer) -> bool:
    return consumer.is_portable and not consumer.is_check
