"""Rotation of a log: when a segment is complete, what begins the next one, what is deleted; options, and losses."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from hostcallback.receiver.files import PRIVATE, Permissions
from hostcallback.receiver.log import logger
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.compression import Compressor
from hostcallback.receiver.taplog.format.layout import Lost, segment_name
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.array_types import Array

FLUSH_BYTES = 256 << 10
FLUSH_SEC = 0.1
"""Limits of unwritten messages of one device: bytes, and seconds since the first one came."""

SEGMENT_BYTES = 64 << 20
SEGMENT_SEC = 3600.0

CONFIG_BYTES = 64 << 10
"""Largest configuration of a run: each segment repeats it."""


def plain_config(config: object) -> dict[str, Any]:
    """Returns a run's configuration as plain data: arrays of one element as numbers, other objects as their texts.

    Of functions, classes and objects whose text is an address, which is another in each run, it has the name of the
    function or class; the latter are logged.

    Raises:
        TypeError: it is not a mapping.
        ValueError: it has more than `CONFIG_BYTES`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config is of type {type(config).__name__}, expected a dict such as {{'lr': 0.1}}; of an "
            "argparse.Namespace or a dataclass give vars(config)"
        )
    found: dict[str, Any] = _plain(config, "config")
    nbytes = len(msgpack.packb(found))
    if nbytes > CONFIG_BYTES:
        raise ValueError(
            f"config takes {nbytes:,} bytes, expected at most {CONFIG_BYTES:,}: give the settings that tell runs apart"
        )
    return found


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if (
        value is None
        or isinstance(value, bool | float | str)
        or (type(value) is int and abs(value) < 1 << 63)
    ):
        return value
    text = str(value)
    if not re.search(r" at 0x[0-9a-fA-F]+", text):
        return text
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if named is not value:
        logger.warning(
            "%s is an object of the class %s, whose text is only an address: the run's configuration has the name of "
            "the class. Give what tells runs apart, such as vars(...) of it", path, name,
        )  # fmt: skip
    return name


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options of `record`, which documents them, with those of a log's buffers.

    Attributes:
        flush_bytes: unwritten bytes of a device at which its messages are written.
        flush_sec: seconds after which unwritten messages are written.
        config: plain data, see `plain_config`.
    """

    segment_bytes: int = SEGMENT_BYTES
    segment_sec: float = SEGMENT_SEC
    keep_bytes: int | None = None
    compress: bool = False
    fsync: bool = False
    process_index: int | None = None
    flush_bytes: int = FLUSH_BYTES
    flush_sec: float = FLUSH_SEC
    job: str = ""
    mode: int = PRIVATE.mode
    run: str = ""
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for sizes and times that are not positive, and a mode that a log cannot have."""
        _ = self.permissions
        for name in ("segment_bytes", "segment_sec", "keep_bytes", "flush_bytes", "flush_sec"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, expected more than 0")

    @property
    def full_bytes(self) -> int:
        """Length at which a segment is completed; at least four are kept, and deleting one loses a quarter at most."""
        return min(self.segment_bytes, self.keep_bytes // 4 if self.keep_bytes else self.segment_bytes)

    def ends(self, segment: SegmentWriter, seconds: float) -> bool:
        """Whether a segment that was begun `seconds` ago is completed, and the next one begun."""
        return segment.nbytes >= self.full_bytes or seconds >= self.segment_sec or segment.has_many_taps

    @property
    def permissions(self) -> Permissions:
        """Permissions of the files and folders."""
        return Permissions(self.mode)


@dataclass(slots=True)
class LogCounters:
    """Counters of a log.

    Attributes:
        messages: written messages, with the failures of checks that were folded into them. Those that turn out to be
            in a deleted file are counted as lost instead.
        nbytes: of all segments so far, deleted ones included.
        lost_messages: those that could not be written, counted alike.
        lost_bytes: their bytes.
        lost_by_device: lost messages by the device's name.
        failure: the last error; empty if there was none.
        unnoted_messages: missing messages, lost or dropped, of which no segment has a note so far.
    """

    messages: int = 0
    nbytes: int = 0
    lost_messages: int = 0
    lost_bytes: int = 0
    lost_by_device: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    unnoted_messages: int = 0


Note = Callable[[SegmentWriter], None]
"""Writes a note into a segment, such as one of rules. It may raise OSError."""


class Losses:
    """The losses of a log: its counters, and the notes that no segment has yet. The writer's lock protects it.

    It keeps what was written since the last look at the segment's file: if the file was deleted, that is lost.

    Attributes:
        counters: of the log.
    """

    def __init__(self) -> None:
        """Nothing is lost yet."""
        self.counters = LogCounters()
        self._notes: dict[tuple[str, str], Lost] = {}
        self._others: list[Note] = []
        self._unseen: dict[tuple[str, str], Lost] = {}
        self._unseen_notes: dict[tuple[str, str], Lost] = {}
        self._unseen_others: list[Note] = []

    def __bool__(self) -> bool:
        """Whether there are notes that no segment has yet."""
        return bool(self._notes or self._others)

    @property
    def unnoted(self) -> int:
        """The number of messages of which no segment has a note yet."""
        return sum(lost.messages for lost in self._notes.values())

    def note(self, lost: Lost) -> None:
        """Keeps a note until a segment has it: one per device and reason, however long the disk is full."""
        _add(self._notes, lost)

    def count(self, lost: Lost) -> None:
        """Notes messages that reached the log and are not in it, and counts them."""
        self.note(lost)
        self.counters.lost_messages += lost.messages
        self.counters.lost_bytes += lost.nbytes
        self.counters.lost_by_device[lost.device] += lost.messages

    def write_to(self, segment: SegmentWriter) -> list[Lost]:
        """Writes the notes into a segment, and returns those of lost messages.

        Raises:
            OSError: a note cannot be written; it and the later ones are kept.
        """
        while self._others:
            self._others[0](segment)
            self.wrote_note(self._others.pop(0))
        written = []
        while self._notes:
            key, lost = next(iter(self._notes.items()))
            segment.lost(lost)
            del self._notes[key]
            _add(self._unseen_notes, lost)
            written.append(lost)
        return written

    def wrote(self, lost: Lost) -> None:
        """Counts messages that were written; `lost` is their note if their file was deleted."""
        self.counters.messages += lost.messages
        _add(self._unseen, lost)

    def wrote_note(self, note: Note) -> None:
        """Takes a note that was written, other than one of lost messages."""
        self._unseen_others.append(note)

    def seen(self) -> None:
        """The segment's file is there, with all that was written."""
        self._unseen, self._unseen_notes, self._unseen_others = {}, {}, []

    def deleted(self) -> bool:
        """The segment's file was deleted. Returns whether messages are lost with it; the next one gets its notes."""
        for note in self._unseen_notes.values():
            self.note(note)
        for lost in self._unseen.values():
            self.counters.messages -= lost.messages
            self.count(lost)
        self._others += self._unseen_others
        has_lost = bool(self._unseen)
        self.seen()
        return has_lost


def _add(notes: dict[tuple[str, str], Lost], lost: Lost) -> None:
    key = lost.device, lost.reason
    known = notes.get(key)
    if known is not None:
        lost = lost._replace(
            first_seq=min(known.first_seq, lost.first_seq),
            last_seq=max(known.last_seq, lost.last_seq),
            messages=known.messages + lost.messages,
            nbytes=known.nbytes + lost.nbytes,
        )
    notes[key] = lost


Folded = Sequence[tuple[int, int]]
"""Pairs of a sequence number and the count of failures of the same check that were left out before it."""


class Segments:
    """The segments of one log: when they start, what may be written, and what becomes of them.

    The writer calls the methods with its lock held, except for `closed`. What does not concern a log does nothing.
    """

    def begin(self, lock: threading.Lock, losses: Losses) -> None:
        """Starts with no segment, at first and in a forked child, which drops those of its parent.

        Args:
            lock: of the writer.
            losses: takes what these segments lose.
        """

    def new(self, number: int) -> SegmentWriter:
        """Starts the segment with that number, counted from 1.

        Raises:
            OSError: it cannot be created.
        """
        raise NotImplementedError

    def finished(self, segment: SegmentWriter) -> None:
        """Called after a segment was closed, complete or not, unless its file was deleted."""

    def wait_for_room(self, nbytes: int) -> None:
        """Called before messages of `nbytes` are written. May wait, and release the lock meanwhile."""

    def choose(self, device: str, block: FrameBlock, folded: Folded) -> Array | None:
        """Returns a mask of the messages to write, or None for all. The others must have been noted as lost."""
        return None

    def is_deleted(self, segment: SegmentWriter) -> bool:
        """Whether readers do not find a segment any more, so that what was written into it is lost."""
        return False

    def wrote(self, segment: SegmentWriter, device: str, block: FrameBlock, folded: Folded) -> None:
        """Called after messages have been written."""

    def noted(self, segment: SegmentWriter, lost: Sequence[Lost] = ()) -> None:
        """Called after notes have been written, of lost messages or of rules."""

    def hurry(self) -> None:
        """Called after messages have been written that must not wait."""

    def closing(self) -> None:
        """Called when the log is being closed, before its last messages are written."""

    def closed(self) -> None:
        """Called after the log was closed."""


class LogSegments(Segments):
    """The segments of a tap log, in a folder that several processes may share. The oldest are deleted if need be."""

    def __init__(self, directory: Path, options: LogOptions) -> None:
        """Creates the folder, if it does not exist.

        Raises:
            OSError: it cannot be created.
            TapLogError: compression is requested, and its package is missing.
        """
        self._directory = directory
        self._options = options
        self._compressor = Compressor() if options.compress else None
        self._complete: list[tuple[Path, int]] = []  # paths and lengths
        options.permissions.make_folder(directory)

    def begin(self, lock: threading.Lock, losses: Losses) -> None:
        """See `Segments`."""
        self._complete = []

    def new(self, number: int) -> SegmentWriter:
        """See `Segments`. The oldest segments make room for the new one."""
        options = self._options
        if options.keep_bytes is not None:
            self._delete_old(options.keep_bytes - options.full_bytes)
        config = {"config": options.config} if options.config else {}
        return SegmentWriter(
            self._directory / segment_name(time.time_ns(), number),
            number=number,
            info={"process_index": options.process_index, "job": options.job, "run": options.run, **config},
            compressor=self._compressor,
            permissions=options.permissions,
        )

    def is_deleted(self, segment: SegmentWriter) -> bool:
        """See `Segments`. A deleted file takes what is written, and has it for as long as it is open."""
        return segment.is_deleted

    def finished(self, segment: SegmentWriter) -> None:
        """See `Segments`."""
        if not segment.is_empty or not self._complete:
            self._complete.append((segment.path, segment.nbytes))
        else:  # the first segment stays even without messages, so that an empty log is a log
            with contextlib.suppress(OSError):
                segment.path.unlink()
        if self._options.keep_bytes is not None:
            self._delete_old(self._options.keep_bytes)

    def _delete_old(self, keep_bytes: int) -> None:
        # The last one stays: a log always has its newest messages, for readers and after a kill.
        while len(self._complete) > 1 and sum(nbytes for _, nbytes in self._complete) > keep_bytes:
            path, _ = self._complete.pop(0)
            # Another process may delete old segments as well, and a segment that stays does no harm.
            with contextlib.suppress(OSError):
                path.unlink()
