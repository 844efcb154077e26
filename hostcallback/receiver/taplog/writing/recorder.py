"""Records messages into a tap log: whole batches, copied out of their source's memory, or single messages as a sink."""

from __future__ import annotations

import itertools
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver import environment, errors, files, processes
from hostcallback.receiver.errors import TapFailure
from hostcallback.receiver.failures.failure_report import FailureHistory
from hostcallback.receiver.failures.steps import Occurrence
from hostcallback.receiver.log import logger
from hostcallback.receiver.messages import Consumer, Find, Message, device_text
from hostcallback.receiver.public_names import hide_frames
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.sources.source import Batch
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import ThinnedTap, align, padding
from hostcallback.receiver.taplog.writing import log_writer, rotation
from hostcallback.receiver.taplog.writing.log_writer import LogWriter, Room
from hostcallback.receiver.wire.array_types import Array, decode_metadata
from hostcallback.receiver.wire.decoder import decode_frame
from hostcallback.receiver.wire.frame import HEADER, Flags, encode_frame
from hostcallback.receiver.wire.tap_descriptor import LOGGED_ELEMENTS, UNDESCRIBED, TapDescriptor
from hostcallback.receiver.wire.truncation import encode_truncated, head, row

NOTE_SEC = 1.0
"""Seconds between two notes of exceptions."""

_CHECK = np.uint64(int(Flags.CHECK))
_END = np.uint64(int(Flags.END_OF_STREAM))

_AS_SINKS_SEE = int.from_bytes(b"as seen", "little")
"""Added to the consumer ids of taps of shards, for records of the values that a sink received instead of shards."""


class Recorder(files.Closing):
    """Writes messages to a log, see docs/tap-log.md. Any thread.

    A receiver that records passes all batches of its devices. The recorder is a sink too: called with a message, it
    records that message. Messages that cannot be written are counted, and no error is raised.

    Example:
        with hcb.record("logs") as recorder, hcb.outfeed_receiver(sinks=[recorder]):
            train()
        print(recorder.directory)
    """

    def __init__(self, log: LogWriter) -> None:
        """Called by `record`."""
        self._log = log
        self._exceptions = FailureHistory()
        self._has_unnoted = False
        self._noted_at = float("-inf")
        self._elements: dict[int, int] = {}  # by consumer id, where it is limited

    @property
    def directory(self) -> os.PathLike[str]:
        """Folder of the log."""
        return self._log.directory

    @property
    def counters(self) -> rotation.LogCounters:
        """Counters of recorded and lost messages."""
        return self._log.counters

    def note_rules(self, thinned: list[ThinnedTap]) -> None:
        """Notes which taps rules thin out, and the messages suppressed since the last note, for `hcb stats`."""
        self._log.note_rules(thinned)

    def note_exception(self, failure: TapFailure) -> None:
        """Notes an exception of a tap function, for `hcb ui`: at once, or with later messages if there are many."""
        self._exceptions.add_exception(failure)
        self._has_unnoted = True
        self._note_if_due()

    def note_steps(self, found: Mapping[Occurrence, int]) -> None:
        """Takes the steps of exceptions that were found since they were noted."""
        self._has_unnoted |= self._exceptions.set_steps(found)

    def _note_if_due(self) -> None:
        if self._has_unnoted and time.monotonic() - self._noted_at >= NOTE_SEC:
            self._note_exceptions()

    def _note_exceptions(self) -> None:
        if not self._has_unnoted:
            return
        self._has_unnoted, self._noted_at = False, time.monotonic()
        try:
            self._log.note_exceptions(self._exceptions.as_dicts())
        except Exception:  # the messages go on
            logger.exception("the exceptions of tap functions cannot be noted in the log")

    def record_batch(
        self,
        device: str,
        batch: Batch,
        find: Find,
        *,
        dropped: int = 0,
        first_seq: int = 0,
        last_seq: int = 0,
    ) -> None:
        """Records a batch of a device's source, before it is released. Does not raise.

        An END_OF_STREAM frame has everything written at once. The arguments are those of a `BatchSink`.
        """
        is_end = False

        def take(room: Room) -> log_writer.Messages | None:
            nonlocal is_end
            block = collect(batch, room)
            is_end = bool(block.flags[-1] & _END)  # such a frame is always alone in its batch
            if is_end:
                return None
            self._describe(block, find)
            if self._elements and not self._elements.keys().isdisjoint(block.consumers):
                block = shortened(block, self._elements)
            folded: list[tuple[int, int]] = []
            if batch.folded:
                pairs = zip(block.seqs.tolist(), batch.folded, strict=True)
                folded = [(seq, count) for seq, count in pairs if count]
            return block, folded, bool((block.flags & _CHECK).any())

        if dropped > 0:
            self._log.lose(device, first_seq, last_seq, dropped, "dropped: no room")
        try:
            self._log.record(device, take)
        except MemoryError as error:
            self._log.lose(device, first_seq, last_seq, batch.count, f"no memory to record it: {error}")
        except Exception:  # a failing recorder must not keep the messages from being delivered
            logger.exception("messages of %s cannot be recorded", device)
            self._log.lose(device, first_seq, last_seq, batch.count, "the recorder failed")
        self._note_if_due()
        if is_end:
            self._log.flush()

    def lose(self, device: str, count: int, reason: str) -> None:
        """Notes messages of a device that were lost before they could be read."""
        self._log.lose(device, 0, 0, count, reason)

    def __call__(self, message: Message) -> None:
        """Records one message.

        Raises:
            TypeError: the wire format cannot represent an array's dtype.
        """
        described = description_of(message.consumer, len(message.arrays))
        flags = Flags.CHECK if message.consumer.is_check else Flags(0)
        device = message.device
        numbers: dict[str, Any] = {
            "flags": flags,
            "seq": message.seq,
            "time_ns": message.time_ns,
            "run_id": message.run_id,
            "device": getattr(device, "id", 0),
        }
        for arrays in unstacked(message):
            if described.shards is not None:
                described, arrays = _as_seen(described, arrays, message)
            self._log.describe(described)
            if LOGGED_ELEMENTS in described.params:
                arrays = [head(array, described.params[LOGGED_ELEMENTS]) for array in arrays]
            arrays, truncated = encode_truncated(arrays)
            numbers["flags"] = flags | (Flags.TRUNCATED if truncated else Flags(0))
            frame = encode_frame(arrays, consumer_id=described.consumer_id, **numbers)
            block = FrameBlock(np.frombuffer(bytearray(frame), np.uint8), np.zeros(1, np.int64))
            self._log.append(device_text(device), block, at_once=bool(flags))

    def write(self) -> None:
        """Writes all collected messages, so that they survive this process."""
        self._log.write()

    def flush(self) -> None:
        """Writes all collected messages, and has them forwarded at once if the log is a spool."""
        self._note_exceptions()
        self._log.flush(look=True)

    def drain(self, timeout_sec: float) -> bool:
        """Writes everything received so far; called at SIGTERM. Returns True when it is in the file."""
        self.flush()
        return True

    def close(self) -> None:
        """Writes all collected messages and completes the segment. Later messages start a new one."""
        self._note_exceptions()
        self._log.close()

    def _describe(self, block: FrameBlock, find: Find) -> None:
        for consumer_id in block.consumers:
            if self._log.knows(consumer_id):
                continue
            consumer = find(consumer_id)
            if consumer is None or consumer.describe is None:
                continue
            index = int((block.consumer_ids == np.uint64(consumer_id)).argmax())
            try:
                arrays = len(decode_metadata(block.metadata(index)))
            except errors.WireError:
                arrays = 0
            described = description_of(consumer, arrays)
            if LOGGED_ELEMENTS in described.params:
                self._elements[consumer_id] = described.params[LOGGED_ELEMENTS]
            self._log.describe(described)


def description_of(consumer: Consumer, arrays: int) -> TapDescriptor:
    """Returns a tap's descriptor, possibly incomplete; `arrays` is the number of arrays per message."""
    try:
        if consumer.describe is not None:
            described = consumer.describe()
            described.pack()
            return described
    except ValueError:
        pass  # a descriptor that cannot be encoded is replaced by the one below
    return TapDescriptor(
        name=consumer.name,
        source_line=consumer.source_line,
        consumer_id=consumer.consumer_id,
        kind=UNDESCRIBED.text,
        params={},
        kwargs={},
        transforms=(),
        tree=["list", [["array"]] * arrays],
        shards=None,
        sharding="global",
    )


def unstacked(message: Message) -> list[list[Any]]:
    """The arrays of each message that a stacked one holds, None where it has None; its own if it is not stacked."""
    if not message.stacked:
        return [list(message.arrays)]
    return [
        [None if array is None else row(array, k) for array in message.arrays] for k in range(message.stacked)
    ]


def _as_seen(
    described: TapDescriptor, arrays: list[Any], message: Message
) -> tuple[TapDescriptor, list[Any]]:
    # Frames of such taps start with a shard record. A whole value needs none; a shard gets one with its place.
    consumer_id = (described.consumer_id + _AS_SINKS_SEE) % 2**64
    if message.shard_index is None:
        return replace(described, consumer_id=consumer_id, shards=None), arrays
    index = message.shard_index
    places = [([part.stop for part in place], [part.start for part in place]) for place in index]
    record = shard_record(places, shards=1, group=0, partition=0)
    described = replace(described, consumer_id=consumer_id + 1, shards="some", sharding="local")
    return described, [np.array(record, np.int64), *arrays]


@hide_frames
def record(
    path: str | os.PathLike[str],
    *,
    segment_bytes: int = rotation.SEGMENT_BYTES,
    segment_sec: float = rotation.SEGMENT_SEC,
    keep_bytes: int | None = None,
    compress: bool = False,
    fsync: bool = False,
    process_index: int | None = None,
    job: str = "",
    mode: int = files.PRIVATE.mode,
    run: str = "",
    config: Mapping[str, Any] | None = None,
) -> Recorder:
    """Creates a recorder for the log in the folder `path`: for `outfeed_receiver(record=...)`, or as a sink.

    Messages are written within 100 ms, failures of checks at once. The receiver thread of a device copies them and
    writes full buffers; a thread of the recorder writes the rest. Errors while writing are logged and counted, and not
    raised. Several processes may write into one folder, and several runs one after the other: readers show the last
    run, or the one they are asked for. Close the recorder, or use it in a `with` block, to complete the last segment;
    an incomplete one can be read too.

    Args:
        path: the folder; created if it does not exist.
        segment_bytes: length in bytes at which a new file is started.
        segment_sec: age in seconds at which a new file is started.
        keep_bytes: limit in bytes of this process's files, beyond which the oldest are deleted, but for the last
            complete one; None to keep all.
        compress: compress messages with zstd (`pip install 'hostcallback[zstd]'`).
        fsync: sync each write to the disk: the log then survives a crash of the machine.
        process_index: this process's index in a program of several, for the readers of its logs.
        job: identifies one run of that program, equal in all its processes: readers use it to assemble sharded arrays.
        mode: permissions of the files that are created, 0o640 for the group to read them, say. Folders that are created
            can then be entered by the same users. Only this user can read them by default.
        run: names the run. A later start of the program with the same name continues it; if its configuration is
            another, one line is logged. By default `$HOSTCALLBACK_RUN`, or a name that no other run has, made of
            program, user and time.
        config: the configuration of the run, which `hcb ui` shows and compares: a dict of numbers, texts, lists and
            dicts, with notes on the run as `notes`, say. Of other objects it has the texts, or the class if the text
            is only an address, which is logged.

    Raises:
        OSError: the folder or its first file cannot be created.
        TapLogError: `compress` without the package zstandard.
        TypeError: `path` is not a path, or `config` not a mapping.
        ValueError: `path` is empty, a size or a time is not positive, a log cannot have the mode, `run` cannot name a
            run, or `config` takes more than 64 KiB.

    Example:
        with hcb.record("logs", run="wide", config={"lr": 3e-4, "notes": "wider"}) as log:
            with hcb.outfeed_receiver(record=log):
                train()
    """
    files.paths_of([path], "the path of a folder, as in hcb.record('run/taps')")
    settings = None if config is None else rotation.plain_config(config)
    options = rotation.LogOptions(
        segment_bytes, segment_sec, keep_bytes, compress, fsync, process_index, job=job, mode=mode,
        run=processes.checked_run(run) if run else processes.own_run(),
        config=settings,
    )  # fmt: skip
    if settings and (run or environment.RUN.read()):
        # Here: a program that continues no run reads no log.
        from hostcallback.receiver.taplog.configurations import tell_of_change

        tell_of_change(Path(path), options.run, settings, process_index)
    try:
        return Recorder(LogWriter(path, options))
    except OSError as error:
        if error.errno is None:
            raise
        text = (
            f"{error.strerror}, so that the log of record={os.fspath(path)!r} cannot be made: give a folder in which "
            "you may create files; it is made if it does not exist"
        )
        raise type(error)(error.errno, text, error.filename) from None


_FLAGS = struct.Struct("<4xI")
_LENGTHS = struct.Struct("<44xIQ")
_EXTERNAL = int(Flags.EXTERNAL)
_FLAGS_AT = 4


def collect(batch: Batch, room: Room = lambda nbytes: np.empty(nbytes, np.uint8)) -> FrameBlock:
    """Copies the frames of a batch, before it is released. EXTERNAL frames become inline ones.

    Args:
        batch: the frames.
        room: provides the memory of the block; new memory by default.
    """
    if batch.columns is not None:
        return FrameBlock(*batch.columns.copied(batch.count, room))
    parts: list[Any] = []
    offsets: list[int] = []
    end = 0
    for memory, offset, external in batch.frames:
        frame = memoryview(memory)[offset:]
        meta_bytes, payload_bytes = _LENGTHS.unpack_from(frame)
        start_bytes = HEADER.size + align(meta_bytes)
        offsets.append(end)
        if external is None:
            end += start_bytes + align(payload_bytes)
            parts.append(frame[: end - offsets[-1]])
            continue
        head = bytearray(frame[:start_bytes])
        (flags,) = _FLAGS.unpack_from(head)
        struct.pack_into("<I", head, _FLAGS_AT, flags & ~_EXTERNAL)
        parts += [head, external, padding(payload_bytes)]
        end += start_bytes + align(payload_bytes)
    data = room(end)
    done = 0
    for part in parts:
        size = len(part)
        data[done : done + size] = np.frombuffer(part, np.uint8)
        done += size
    return FrameBlock(data, np.array(offsets, np.int64))


def shortened(block: FrameBlock, limits: Mapping[int, int]) -> FrameBlock:
    """Returns the frames with truncated arrays where their consumer id has a limit, in elements of each array."""
    frames: list[Array] = []
    for start, stop in itertools.pairwise([*block.starts, block.data.size]):
        frame = block.data[start:stop]
        header, arrays = decode_frame(frame)
        elements = limits.get(header.consumer_id)
        if elements is not None and not header.flags & Flags.TRUNCATED:
            arrays, is_truncated = encode_truncated([head(array, elements) for array in arrays])
            flags = header.flags | (Flags.TRUNCATED if is_truncated else Flags(0))
            encoded = encode_frame(
                arrays, consumer_id=header.consumer_id, flags=flags, seq=header.seq, time_ns=header.time_ns,
                run_id=header.run_id, device=header.device,
            )  # fmt: skip
            frame = np.frombuffer(encoded, np.uint8)
        frames.append(frame)
    offsets = np.cumsum([0, *(len(frame) for frame in frames[:-1])])
    return FrameBlock(np.concatenate(frames), offsets)
