"""Many hosts on one collector: what both sides use, how soon writes are acknowledged, and whether all is stored."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import hostcallback as hcb
from tools.bench.blocks import TAP
from tools.bench.machine import resident_mib
from tools.bench.servers import ROOT, folder_in_memory, nats_server
from tools.scale.hosts import RUN, Done, Load
from tools.soak.accounting import in_segments
from tools.soak.parts import START_SEC, Collector, environment

IN_A_PROCESS = 32
"""Hosts that one process simulates, at most."""

SETTLE_SEC = 1.0
LATE_SEC = 1.0
LOADS = {"idle": (0.0, 0), "slow": (1.0, 10), "small": (5.0, 10), "large": (1.0, 1000)}
"""Writes a second of each host, and scalars of a write."""


class Measured(NamedTuple):
    """What one number of hosts took under one load. Rates are of all hosts together.

    Attributes:
        hosts: their number.
        load: name of the load.
        messages: that were written.
        messages_sec: messages a second.
        slices_sec: slices a second.
        mib_sec: MiB of slices a second.
        collector_ms: processor time of the collector, ms a second.
        hosts_ms: processor time of all hosts.
        wire_bytes: bytes over the network for each message, both directions, with the headers of TCP and IP.
        file_bytes: bytes in the collector's files for each message.
        resident_mib: resident memory of the collector, at the end.
        files: its open files.
        p50_ms: median time until a write is acknowledged.
        p99_ms: time in which 99 of 100 writes are.
        late_sec: how far the hosts were behind their plan at the end.
        server_ms: processor time of the NATS server, if there was one.
    """

    hosts: int
    load: str
    messages: int
    messages_sec: float
    slices_sec: float
    mib_sec: float
    collector_ms: float
    hosts_ms: float
    wire_bytes: float
    file_bytes: float
    resident_mib: float
    files: int
    p50_ms: float
    p99_ms: float
    late_sec: float
    server_ms: float = 0.0

    @property
    def is_saturated(self) -> bool:
        """Whether hosts were late with their writes, or had to send several writes in one slice."""
        return self.slices_sec * LOADS[self.load][1] < 0.9 * self.messages_sec or self.late_sec > LATE_SEC


class _Usage(NamedTuple):
    processor_ms: float
    resident_mib: float
    files: int
    wire: int
    stored: int
    server_ms: float


def _processor_ms(process: int) -> float:
    # By the clock of clock_getcpuclockid(3): `stat` counts in steps of 10 ms.
    return time.clock_gettime(~process << 3 | 2) * 1e3


def _usage(collector: Collector, server: int) -> _Usage:
    folder = Path("/proc", str(collector.pid))
    loopback = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    stored = sum(path.stat().st_size for path in (collector.log / RUN).glob("*.hcblog"))
    return _Usage(
        _processor_ms(collector.pid), resident_mib(collector.pid), len(os.listdir(folder / "fd")),
        int(loopback.partition("lo:")[2].split()[0]), stored, _processor_ms(server) if server else 0.0,
    )  # fmt: skip


class Hosts:
    """The processes that simulate hosts."""

    def __init__(self, address: str, folder: Path, count: int) -> None:
        """Starts them, and waits until all hosts are connected."""
        self._processes = []
        for first in range(0, count, IN_A_PROCESS):
            arguments = [address, str(folder), str(first), str(min(IN_A_PROCESS, count - first))]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tools.scale.hosts", *arguments],
                    cwd=ROOT,
                    env=environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            self._expect("ready")
        except BaseException:
            self.kill()
            raise

    def carry_out(self, load: Load) -> list[Done]:
        """Has all hosts carry out a load."""
        self._tell(json.dumps(load._asdict()))
        return [Done(**json.loads(line)) for line in self._lines()]

    def end(self) -> None:
        """Completes all streams."""
        self._tell("")
        self._expect("ended")

    def kill(self) -> None:
        """Ends the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def _lines(self) -> Iterator[str]:
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("a process of hosts has ended, see its error above")
            yield line

    def _expect(self, word: str) -> None:
        assert [line.strip() for line in self._lines()] == [word] * len(self._processes)


def measure(count: int, seconds: float, nats: str | None = None) -> tuple[list[Measured], list[str]]:
    """Runs a collector and a number of hosts under each load; returns what it took, and what is wrong.

    Args:
        count: number of hosts.
        seconds: of each load.
        nats: path of a NATS server, which is run between the hosts and the collector; None for none.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_in_memory())
        (folder / "kept").mkdir()
        url, server = stack.enter_context(nats_server(nats, folder)) if nats else ("", 0)
        collector = Collector(folder, *(("--nats", url) if nats else ()))
        try:
            _wait_for(collector)
            hosts = Hosts(url or collector.address, folder, count)
            try:
                found = [_under(load, hosts, collector, server, count, seconds) for load in LOADS]
                hosts.end()
            finally:
                hosts.kill()
            stored = collector.log / RUN
            faults = _compare_values(stored, count, found) if nats else []
        except BaseException:
            collector.kill()
            raise
        faults += [] if collector.stop() == 0 else ["the collector ended with an error"]
        faults += collector.faults() + ([] if nats else _compare(folder, stored, count, found))
    return found, [f"{count} hosts: {fault}" for fault in faults]


def _wait_for(collector: Collector) -> None:
    host, _, port = collector.address.rpartition(":")
    pause, deadline = threading.Event(), perf_counter() + START_SEC
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=START_SEC).close()
        except ConnectionRefusedError:
            if perf_counter() > deadline:
                raise
            pause.wait(0.05)
        else:
            return


def _under(
    name: str, hosts: Hosts, collector: Collector, server: int, count: int, seconds: float
) -> Measured:
    threading.Event().wait(min(SETTLE_SEC, seconds))
    per_second, messages = LOADS[name]
    before, began = _usage(collector, server), perf_counter()
    done = hosts.carry_out(Load(per_second, messages, seconds))
    after, took = _usage(collector, server), perf_counter() - began
    total = sum(each.messages for each in done)
    acks_ms = [taken for each in done for taken in each.acks_ms]
    assert len(acks_ms) == total // max(messages, 1), "a write was not acknowledged"
    p50, p99 = np.percentile(acks_ms, [50, 99]) if acks_ms else (0.0, 0.0)
    return Measured(
        hosts=count,
        load=name,
        messages=total,
        messages_sec=total / took,
        slices_sec=sum(each.slices for each in done) / took,
        mib_sec=sum(each.nbytes for each in done) / took / 2**20,
        collector_ms=(after.processor_ms - before.processor_ms) / took,
        hosts_ms=sum(each.processor_sec for each in done) * 1e3 / took,
        wire_bytes=(after.wire - before.wire) / max(total, 1),
        file_bytes=(after.stored - before.stored) / max(total, 1),
        resident_mib=after.resident_mib,
        files=after.files,
        p50_ms=float(p50),
        p99_ms=float(p99),
        late_sec=max(each.late_sec for each in done),
        server_ms=(after.server_ms - before.server_ms) / took,
    )


def _compare(folder: Path, stored: Path, count: int, found: Sequence[Measured]) -> list[str]:
    # The files must be those of the spools, and have the numbers of each host from 0 on, once and in order.
    names = {path.name for path in (folder / "kept").iterdir()}
    there = {path.name for path in stored.glob("*.hcblog")}
    faults = [f"{name} is stored, and was not sent" for name in there - names]
    faults += [f"{name} was sent, and is not stored" for name in names - there]
    faults += [
        f"{name} is stored otherwise than it was sent"
        for name in names & there
        if not filecmp.cmp(folder / "kept" / name, stored / name, shallow=False)
    ]
    streams = [
        list(paths) for _, paths in itertools.groupby(sorted(there), lambda name: name.rpartition("-")[0])
    ]
    each = sum(row.messages for row in found) // count
    for stream in streams:
        held, wrong = in_segments(stored / name for name in stream)
        faults += wrong + held.faults(stream[0])
        if held.count != each:
            faults.append(f"{stream[0]}: {held.count} messages are stored, expected {each}")
    if len(streams) != count:
        faults.append(f"{len(streams)} streams are stored, expected {count}")
    if list((folder / "spool").glob("*~*")):
        faults.append("spools were left")
    return faults


def _compare_values(stored: Path, count: int, found: Sequence[Measured]) -> list[str]:
    # A collector behind NATS stores messages in files of its choice: of each number there must be one for each host.
    each = sum(row.messages for row in found) // count
    pause, deadline = threading.Event(), perf_counter() + START_SEC
    while True:
        values = hcb.read(stored)[TAP.name].to_numpy()[TAP.name].ravel()
        if len(values) >= each * count or perf_counter() > deadline:
            break
        pause.wait(0.5)
    wrong = np.flatnonzero(np.bincount(values, minlength=each) != count)
    return [f"{len(wrong)} numbers are not stored once for each host, first {wrong[0]}"] if wrong.size else []


HEAD = (
    "hosts", "load", "messages/s", "slices/s", "MiB/s", "collector, ms/s", "all hosts, ms/s",
    "network, bytes/message", "files, bytes/message", "collector, MiB", "its open files", "ack p50, ms", "p99, ms",
    "behind, s",
)  # fmt: skip


def table(found: Sequence[Measured]) -> str:
    """The measurements as a table."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for row in found:
        cells: list[Any] = [
            row.hosts, row.load, f"{row.messages_sec:,.0f}", f"{row.slices_sec:,.0f}", f"{row.mib_sec:.1f}",
            f"{row.collector_ms:.0f}", f"{row.hosts_ms:.0f}", f"{row.wire_bytes:.0f}", f"{row.file_bytes:.0f}",
            f"{row.resident_mib:.0f}", row.files, f"{row.p50_ms:.0f}", f"{row.p99_ms:.0f}",
            f"{max(row.late_sec, 0.0):.1f}",
        ]  # fmt: skip
        if not row.messages:
            cells = [cell if place not in (7, 8, 11, 12) else "-" for place, cell in enumerate(cells)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def nats_table(direct: Sequence[Measured], through: Sequence[Measured]) -> str:
    """The same hosts and loads without and with a NATS server, as a table."""
    lines = [
        "| hosts | load | slices/s: direct | NATS | collector, ms/s: direct | NATS | NATS server, ms/s "
        "| all hosts, ms/s: direct | NATS | ack p50, ms: direct | NATS | p99, ms: direct | NATS |",
        "|" + "---|" * 13,
    ]
    for one, other in zip(direct, through, strict=True):
        cells = [
            one.hosts, one.load, f"{one.slices_sec:,.0f}", f"{other.slices_sec:,.0f}", f"{one.collector_ms:.0f}",
            f"{other.collector_ms:.0f}", f"{other.server_ms:.0f}", f"{one.hosts_ms:.0f}", f"{other.hosts_ms:.0f}",
            f"{one.p50_ms:.0f}", f"{other.p50_ms:.0f}", f"{one.p99_ms:.0f}", f"{other.p99_ms:.0f}",
        ]  # fmt: skip
        if not one.messages:
            cells[-4:] = ["-"] * 4
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
