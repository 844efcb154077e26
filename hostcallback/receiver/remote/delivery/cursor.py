"""The file in which a collector keeps how far it has delivered each stream to its consumers.

The file is a msgpack list with an entry per stream: the stream, and the position up to which all messages were
delivered. If shards of incomplete values are excepted, the position before the first of them and their sequence
numbers by device follow, otherwise two nils. The last item is the number of messages after the position that were
delivered, too: a turn may end within a chunk. If the collector writes a file of metrics, a last entry has the text
`metrics`, nil, and the state of that file after these messages.

A collector runs the probe for the chunk in whose delivery the collector before died. If it fails, the chunk is set
aside.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.failures.deferred_errors import OnError
from hostcallback.receiver.files import write_private
from hostcallback.receiver.log import logger
from hostcallback.receiver.remote.delivery.stream_printer import StreamPrinter
from hostcallback.receiver.remote.forwarding_protocol import MAX_SEGMENT, StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.stream_reader import Again, StoredRuns
from hostcallback.receiver.replayer.log_delivery import LogDelivery
from hostcallback.receiver.runtime.dispatch.scope import Scope
from hostcallback.receiver.taplog.format.layout import Damage, Kind
from hostcallback.receiver.taplog.reading import merge, segment_reader, selection
from hostcallback.receiver.wire.pytree import unpack_plain

CURSOR_NAME = ".delivered"

METRICS = "metrics"
"""What stands for a stream in the entry of the file of metrics."""

SURROGATES = "surrogatepass"
"""How texts are encoded: the name of a file need not be UTF-8."""


class Waiting(NamedTuple):
    """The location of a shard that waits for other shards of its value.

    Attributes:
        position: where reading must start to find it.
        device: name of its device.
        seq: its sequence number on that device.
    """

    position: StreamOffset
    device: str
    seq: int


class Cursor:
    """How far each stream was delivered, in a file. One thread.

    Attributes:
        metrics: the state of the file of metrics after these messages, plain data; None if there is none.
    """

    def __init__(self, directory: Path) -> None:
        """Reads the file. A missing or invalid one counts as empty: then everything is delivered again."""
        self._path = directory / CURSOR_NAME
        self._positions: dict[StreamKey, StreamOffset] = {}
        self._waiting: dict[StreamKey, Again] = {}
        self._done: dict[StreamKey, int] = {}
        self.metrics: Any = None
        self._is_saved = True
        # A file that a crash left invalid costs repeated deliveries. Raising would keep the collector from starting.
        invalid = (
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            msgpack.UnpackException,
            BadStreamError,
        )
        with contextlib.suppress(OSError, *invalid):
            for folder, position, *rest in msgpack.unpackb(
                self._path.read_bytes(), unicode_errors=SURROGATES
            ):
                key = StreamKey.of_folder(folder)
                if folder == METRICS:
                    (self.metrics,) = rest
                elif key is not None:
                    self._positions[key] = StreamOffset.of(position)
                    since, seqs, done = [*rest, None, None, 0][:3] if len(rest) != 2 else (*rest, 0)
                    if since is not None:
                        self._waiting[key] = Again(StreamOffset.of(since), _seqs(seqs))
                    self._done[key] = _number(done)

    @property
    def is_empty(self) -> bool:
        """Whether no stream has a position."""
        return not self._positions

    def position(self, key: StreamKey) -> StreamOffset:
        """Position from which to continue a stream."""
        return self._positions.get(key, StreamOffset(0, 0))

    def done(self, key: StreamKey) -> int:
        """Number of messages after that position that were delivered."""
        return self._done.get(key, 0)

    def waiting(self, key: StreamKey) -> Again | None:
        """Shards before that position whose values are incomplete; None if there are none."""
        return self._waiting.get(key)

    def wait_for(self, shards: Iterable[tuple[StreamKey, Waiting]]) -> None:
        """Sets the shards whose values are incomplete. All other messages before the positions were delivered."""
        since: dict[StreamKey, StreamOffset] = {}
        seqs: dict[StreamKey, dict[str, list[int]]] = {}
        for key, (position, device, seq) in shards:
            since[key] = min(position, since.get(key, position))
            seqs.setdefault(key, {}).setdefault(device, []).append(seq)
        waiting = {key: Again(since[key], seqs[key]) for key in since}
        if waiting != self._waiting:
            self._waiting = waiting
            self._is_saved = False

    def move(self, key: StreamKey, position: StreamOffset, done: int = 0) -> None:
        """Notes that all messages of a stream before `position`, and `done` after it, have been delivered."""
        if self._positions.get(key) != position or self.done(key) != done:
            self._positions[key], self._done[key] = position, done
            self._is_saved = False

    def note_metrics(self, state: Any) -> None:
        """Sets the state of the file of metrics after the messages before the positions."""
        if self.metrics != state:
            self.metrics = state
            self._is_saved = False

    def pass_over(self, key: StreamKey, position: StreamOffset) -> None:
        """Skips everything of a stream before `position`: it will not be delivered."""
        self._waiting.pop(key, None)
        self._is_saved = False
        if position > self.position(key):
            self.move(key, position)

    def save(self) -> None:
        """Writes the file if anything has changed.

        Raises:
            OSError: it cannot be written; the old file stays.
        """
        if self._is_saved:
            return
        entries = [self._entry(key) for key in self._positions]
        if self.metrics is not None:
            entries.append((METRICS, None, self.metrics))
        data: bytes = msgpack.packb(entries, unicode_errors=SURROGATES)
        new = self._path.with_suffix(".new")
        write_private(new, data)
        os.replace(new, self._path)
        self._is_saved = True

    def _entry(self, key: StreamKey) -> tuple[Any, ...]:
        waiting = self._waiting.get(key)
        since, seqs = (None, None) if waiting is None else (waiting.since, waiting.seqs)
        return key.folder, self._positions[key], since, seqs, self.done(key)


def _seqs(found: dict[str, list[int]]) -> dict[str, list[int]]:
    return {str(device): list(map(_number, seqs)) for device, seqs in found.items()}


def _number(found: object) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"{found!r} is not a number of a message")
    return found


IN_PROGRESS_NAME = ".delivering"
FILE_BYTES = 512


class Interrupted(NamedTuple):
    """A chunk in whose delivery a collector died.

    Attributes:
        key: its stream.
        position: of the chunk.
        deaths: how often.
    """

    key: StreamKey
    position: StreamOffset
    deaths: int


class InProgress:
    """Notes the chunk that is being delivered. One thread. A write into the mapped file outlives the process."""

    def __init__(self, directory: Path) -> None:
        """Reads what the collector before left, and maps the file. Without the file, nothing is noted."""
        self.interrupted: Interrupted | None = None
        self._map: mmap.mmap | None = None
        self._now: tuple[StreamKey, StreamOffset] | None = None
        try:
            descriptor = os.open(directory / IN_PROGRESS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, FILE_BYTES)
                self._map = mmap.mmap(descriptor, FILE_BYTES)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be written: %s", directory / IN_PROGRESS_NAME, error)
            return
        # The collector may have been killed while it wrote the record. No message is suspected then.
        with contextlib.suppress(ValueError, TypeError, BadStreamError):
            folder, position, deaths = unpack_plain(
                self._map[2 : 2 + int.from_bytes(self._map[:2], "little")]
            )
            key = StreamKey.of_folder(folder)
            if key is not None and type(deaths) is int and deaths >= 0:
                self.interrupted = Interrupted(key, StreamOffset.of(position), deaths + 1)
        self._clear()

    def enter(self, key: StreamKey, position: StreamOffset) -> None:
        """Notes that the chunk at `position` is delivered now."""
        now = key, position
        if self._map is None or self._now == now:
            return
        self._now = now
        before = self.interrupted
        deaths = before.deaths if before is not None and before[:2] == now else 0
        data: bytes = msgpack.packb((key.folder, position, deaths))
        # The length comes last: a process that is killed in between leaves a length of 0, or a record that cannot
        # be decoded, and no message is suspected.
        self._map[2 : 2 + len(data)] = data
        self._map[:2] = len(data).to_bytes(2, "little")

    def leave(self) -> None:
        """Notes that no chunk is being delivered."""
        if self._now is not None:
            self._clear()

    def _clear(self) -> None:
        self._now = None
        if self._map is not None:
            self._map[:2] = bytes(2)


MEMORY_BYTES = 4 << 30
CPU_SEC = 60
WAIT_SEC = 120.0


class Findings(enum.Enum):
    """The result of a trial read in a child process.

    Attributes:
        HARMLESS: it has read and shown the chunk.
        POISON: it died of the chunk.
        UNREADABLE: it died of what stands before the chunk in its segment: descriptions of taps.
    """

    HARMLESS = enum.auto()
    POISON = enum.auto()
    UNREADABLE = enum.auto()


def examine(path: Path, key: StreamKey, position: StreamOffset) -> Findings:
    """Tries to read and to show the chunk at `position` of a stream, whose segment is at `path`."""
    if _survives("show", path, key, position):
        return Findings.HARMLESS
    return Findings.POISON if _survives("open", path, key, position) else Findings.UNREADABLE


def _survives(action: str, path: Path, key: StreamKey, position: StreamOffset) -> bool:
    command = [sys.executable, "-m", __name__, action, str(path), key.folder, *map(str, position)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=WAIT_SEC, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(action: str, path: Path, key: StreamKey, position: StreamOffset) -> None:
    """Reads one chunk, or only what stands before it; raises or dies if that is not possible."""
    # Both are limits of this process alone: what killed the collector must not take the machine with it.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SEC, CPU_SEC))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if action == "open":
        for item in segment_reader.SegmentReader(path).chunks():
            if isinstance(item, Damage) or item.kind is Kind.DESCRIPTIONS:
                continue
            if item.end > position.offset:
                return
        return
    runs = StoredRuns(
        lambda number: path.with_name(key.segment_name(number)), position, lambda described: True
    )
    printer = StreamPrinter(
        lambda: f"p{key.process}", runs.local_devices.get, lambda message: None, everything=True
    )
    scope = Scope("probe", 100, on_error=OnError.WARN)
    delivery = LogDelivery(scope, selection.Selection(), sinks=[printer], printers=False)
    for record in runs.read(StreamOffset(MAX_SEGMENT, 0), 1):
        if isinstance(record, merge.Stretch):
            delivery.deliver(record)


if __name__ == "__main__":
    found = StreamKey.of_folder(sys.argv[3])
    assert found is not None
    main(sys.argv[1], Path(sys.argv[2]), found, StreamOffset(int(sys.argv[4]), int(sys.argv[5])))
