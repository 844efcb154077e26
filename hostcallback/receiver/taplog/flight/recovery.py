"""Converts the files that killed processes left in a flight recorder's folder into a tap log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hostcallback.receiver import errors, files, limits, processes
from hostcallback.receiver.sources.source import Frame
from hostcallback.receiver.taplog.flight import recorder
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage, Lost, segment_name
from hostcallback.receiver.taplog.format.step_finder import StepFinder
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.recorder import collect
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

CHUNK_FRAMES = 1024
MAX_WORDS = 1000
"""Words of a process's command line that are shown."""


class NoFlightError(errors.HostCallbackError):
    """A folder has no files of a flight recorder."""


class _Batch(NamedTuple):
    # A part of a ring, with the interface of a source's batch.
    frames: Sequence[Frame]
    columns: None = None
    folded: Sequence[int] = ()

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.frames)

    def release(self) -> None:
        pass


@dataclass(slots=True)
class Flight:
    """The files of one process.

    Attributes:
        folder: of the files.
        process: the process's description of itself; empty if it is missing.
        rings: of its devices, by name.
        problems: unreadable files, as sentences.
    """

    folder: Path
    process: dict[str, Any]
    rings: list[recorder.RingContents] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether the process seems to run still, on this machine."""
        pid = self.process.get("pid")
        if self.process.get("host") != os.uname().nodename or not isinstance(pid, int):
            return False
        return processes.is_alive(pid)

    @property
    def run(self) -> str:
        """Name of its run; empty if it has none, as those of earlier versions."""
        return str(self.process.get("run", ""))

    @property
    def title(self) -> str:
        """Describes the process in a few words."""
        if not self.process:
            return self.folder.name
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.process["started_ns"] // 10**9))
        running = ", still running" if self.is_running else ""
        command = " ".join(self.process["command"])
        run = f", run {self.run}" if self.run else ""
        return f"{self.process['host']}:{self.process['pid']} {command} (started {started}{running}{run})"


def find_flights(directory: Path) -> list[Flight]:
    """Finds the flights in a flight recorder's folder, or in the folder of one process; the oldest first.

    Raises:
        NoFlightError: no process has left files there, or it is no folder.
        OSError: the folder cannot be read.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise NoFlightError(
            f"{directory} {what}: give the folder of HOSTCALLBACK_FLIGHT_RECORDER or of flight_recorder= (hcb cat "
            "shows the logs of record=)"
        )
    folders = [directory, *sorted(entry for entry in directory.iterdir() if entry.is_dir())]
    flights = [_read(folder) for folder in folders if any(folder.glob(f"*{recorder.SUFFIX}"))]
    if not flights:
        raise NoFlightError(
            f"{directory} has no files of a flight recorder (*{recorder.SUFFIX}, in a folder per process): a process "
            "that ends normally removes its own"
        )
    return sorted(flights, key=lambda flight: flight.process.get("started_ns", 0))


def _read(folder: Path) -> Flight:
    flight = Flight(folder, {})
    try:
        with (folder / recorder.PROCESS_FILE).open("rb") as file:
            data = file.read(limits.FILE_BYTES + 1)
        flight.process = _process(data)
    except (OSError, ValueError, RecursionError) as error:
        flight.problems.append(f"{folder / recorder.PROCESS_FILE} does not identify the process: {error}")
    for path in sorted(folder.glob(f"*{recorder.SUFFIX}")):
        try:
            flight.rings.append(recorder.read_ring(path))
        except (OSError, errors.HostCallbackError) as error:
            flight.problems.append(str(error))
    return flight


def _process(data: bytes) -> dict[str, Any]:
    if len(data) > limits.FILE_BYTES:
        raise ValueError(f"it is longer than {limits.FILE_BYTES} bytes")
    found = json.loads(data)
    known = found if isinstance(found, dict) else {}
    host, pid, started_ns = known.get("host"), known.get("pid"), known.get("started_ns")
    command = known.get("command", [])
    if type(host) is not str or type(pid) is not int or type(started_ns) is not int:
        raise ValueError("it does not state host, pid and started_ns")
    if not 0 < pid < 2**31 or not 0 <= started_ns < 2**63 or not isinstance(command, list):
        raise ValueError(f"it states the process {str(pid)[:20]}, begun at {str(started_ns)[:20]}")
    words = [str(word)[: limits.NAME_CHARS] for word in command[:MAX_WORDS]]
    run = known.get("run")
    return {
        "host": host[: limits.NAME_CHARS],
        "pid": pid,
        "started_ns": started_ns,
        "command": words,
        "run": run if processes.is_run(run) else "",
    }


def write_log(flight: Flight, directory: Path, *, delivered: bool = True) -> Path:
    """Writes the messages of a process into a tap log, as one segment.

    Args:
        flight: of the process.
        directory: the log's folder; created if it does not exist.
        delivered: whether to include messages that had been delivered.

    Returns:
        The segment.

    Raises:
        OSError: it cannot be written.
    """
    consumers = _described(flight)
    files.PRIVATE.make_folder(directory)
    path = directory / segment_name(time.time_ns(), 1)
    info: dict[str, Any] = {"process": flight.folder.name}
    info |= {key: flight.process[key] for key in ("host", "pid", "run") if key in flight.process}
    writer = SegmentWriter(path, info=info)
    try:
        for ring in flight.rings:
            _write_ring(ring, writer, consumers, delivered=delivered)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return path


def _write_ring(
    ring: recorder.RingContents,
    writer: SegmentWriter,
    consumers: dict[int, TapDescriptor],
    *,
    delivered: bool,
) -> None:
    steps = StepFinder(consumers)
    step = NO_STEP
    for some in _chunks([message for message in ring.frames if message.frame]):
        block = collect(_Batch([(message.frame, 0, None) for message in some]))
        found = steps.in_force(block, step)
        wanted = [message for message in some if delivered or not message.delivered]
        if len(wanted) < len(some):
            # Delivered messages come first in a ring, so the steps to keep are the last ones.
            step = int(found[len(some) - len(wanted) - 1])
            found = found[len(some) - len(wanted) :]
            block = collect(_Batch([(message.frame, 0, None) for message in wanted]))
        if wanted:
            writer.frames(ring.name, block, consumers, step_before=step, steps=found)
            step = int(found[-1])
    for message in ring.frames:
        if not message.frame and (delivered or not message.delivered):
            header = message.header
            writer.lost(
                Lost(
                    ring.name, header.seq, header.seq, 1, header.payload_bytes, header.time_ns,
                    "its arrays were not in the ring's file",
                )
            )  # fmt: skip


def _chunks(messages: Sequence[recorder.RecoveredFrame]) -> Iterator[Sequence[recorder.RecoveredFrame]]:
    for start in range(0, len(messages), CHUNK_FRAMES):
        yield messages[start : start + CHUNK_FRAMES]


def _described(flight: Flight) -> dict[int, TapDescriptor]:
    path = flight.folder / recorder.TAPS_FILE
    try:
        reader = SegmentReader(path)
        for chunk in reader.chunks():
            if isinstance(chunk, Damage) and not chunk.torn:
                flight.problems.append(f"{path}: {chunk.reason}")
        return {consumer_id: described for consumer_id, (_, described) in reader.consumers.items()}
    except (OSError, errors.TapLogError) as error:
        flight.problems.append(f"the taps' descriptors cannot be read: {error}")
        return {}
