"""Ports for the servers of tests."""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST = 12_000


def free_port() -> int:
    """A port of this machine without a listener, which no connection is given while its server is away."""
    described = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(described.read_text().split()[0]) if described.exists() else 32_768
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(FIRST, max(end, FIRST + 1_000))
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port))
            except OSError:
                continue
        return port
