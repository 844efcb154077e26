"""The benchmark of 64 clients on one collector: how long each write to a spool takes to be acknowledged."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.row import Figure, Row
from tools.bench.servers import ROOT, bare_server, collector, folder_in_memory

PROCESSES, STREAMS, PER_SECOND, SECONDS = 4, 16, 5, 10
LIMIT_MS = 250.0


def many_clients(rounds: int) -> list[Row]:
    """64 streams from 4 processes to one collector, each writing 10 scalars to its spool 5 times a second, at once.

    The clock starts when the messages are in the spool's file, which must not wait, and stops when the client learns
    that the collector has stored them. Everything runs on one machine. The peer is the same number of bare gRPC streams
    with messages of the same length; its server only answers.
    """
    with folder_in_memory() as folder, collector(folder) as address, bare_server() as bare:
        taken = _seconds(address, folder / "spool")
        answered = _seconds(bare, folder / "spool", "--bare")
    p50, p99 = (Figure(float(value), 0.0) for value in np.percentile(taken, [50, 99]) * 1e3)
    peer = Figure(float(np.percentile(answered, 99)) * 1e3, 0.0)
    name = f"{PROCESSES * STREAMS} clients, each {PER_SECOND} writes a second: until a write is acknowledged"
    return [
        p99.within(LIMIT_MS, f"{name}, p99", "ms"),
        p99.versus(peer, "the same", "ms", "bare gRPC streams that are answered, p99", None),
        p50.within(LIMIT_MS, f"{name}, p50", "ms", None),
    ]


def _seconds(address: str, spool: Path, *arguments: str) -> Any:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(_clients(address, spool, number * STREAMS, arguments))
            for number in range(PROCESSES)
        ]
        for client in clients:
            assert client.stdout.readline() == "ready\n"
        for client in clients:
            client.stdin.write("\n")
            client.stdin.flush()
        found = [json.loads(client.stdout.readline()) for client in clients]
    return np.concatenate([each["seconds"] for each in found])


def _clients(address: str, spool: Path, first: int, more: tuple[str, ...]) -> Any:
    arguments = {"first": first, "clients": STREAMS, "per-second": PER_SECOND, "seconds": SECONDS}
    return subprocess.Popen(
        [
            sys.executable, "-m", "tools.bench.programs.many_clients", address, spool, *more,
            *(part for name, value in arguments.items() for part in (f"--{name}", str(value))),
        ],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
