"""Records messages into a tap log: as they come from the devices, or as a sink gets them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from receiver.closing import Closing
from receiver.log import logger
from receiver.messages.message import Consumer, Message
from receiver.sinks.print import device_text
from receiver.sinks.sharding.shard_record import shard_record
from receiver.sources.source import Batch
from receiver.taplog.format.block import FrameBlock
from receiver.taplog.writing.frame_copier import Room, collect
from receiver.taplog.writing.log_writer import LogWriter, Messages
from receiver.taplog.writing.options import SEGMENT_BYTES, SEGMENT_SEC, LogCounters, LogOptions
from receiver.wire import Flags, WireError, decode_metadata, encode_frame
from receiver.wire.tap_descriptor import TapDescriptor
from receiver.wire.tap_kind import UNDESCRIBED
from receiver.wire.truncation import encode_truncated, row

Find = Callable[[int], Consumer | None]

_CHECK = np.uint64(int(Flags.CHECK))
_END = np.uint64(int(Flags.END_OF_STREAM))

_AS_SINKS_SEE = int.from_bytes(b"as seen", "little")
"""Added to the consumer ids of taps of shards where not the shards are recorded but what was made of them."""


class Recorder(Closing):
    """Writes messages to a log, see docs/tap-log.md. Any thread.

    A receiver that records hands it everything that comes from its devices. It is a sink, too: called with a message it
    records that one. What cannot be written is counted and never raised.
    """

    def __init__(self, log: LogWriter) -> None:
        """Use `record`."""
        self._log = log

    @property
    def directory(self) -> os.PathLike[str]:
        """The log's folder."""
        return self._log.directory

    @property
    def counters(self) -> LogCounters:
        """What was recorded so far, and what could not be."""
        return self._log.counters

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
        """Records what a device's source has read, before it is released. Does not raise.

        Args:
            device: the device's name.
            batch: the frames; an END_OF_STREAM frame has everything written at once.
            find: finds the consumer of an id.
            dropped: how many messages of the device are missing among them, or before them.
            first_seq: where the first of those was to be expected.
            last_seq: of the batch.
        """
        is_end = False

        def take(room: Room) -> Messages | None:
            nonlocal is_end
            block = collect(batch, room)
            is_end = bool(block.flags[-1] & _END)  # the only one of its batch
            if is_end:
                return None
            self._describe(block, find)
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
        except Exception:  # whatever it is, the messages are still to be delivered
            logger.exception("messages of %s cannot be recorded", device)
            self._log.lose(device, first_seq, last_seq, batch.count, "the recorder failed")
        if is_end:
            self._log.flush()

    def lose(self, device: str, count: int, reason: str) -> None:
        """Notes that messages of a device were lost before anybody could read them."""
        self._log.lose(device, 0, 0, count, reason)

    def __call__(self, message: Message) -> None:
        """Records one message.

        Raises:
            TypeError: an array has a dtype that the wire does not have.
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
        for arrays in _unstacked(message):
            if described.shards is not None:
                described, arrays = _as_seen(described, arrays, message)
            self._log.describe(described)
            arrays, truncated = encode_truncated(arrays)
            numbers["flags"] = flags | (Flags.TRUNCATED if truncated else Flags(0))
            frame = encode_frame(arrays, consumer_id=described.consumer_id, **numbers)
            block = FrameBlock(np.frombuffer(bytearray(frame), np.uint8), np.zeros(1, np.int64))
            self._log.append(device_text(device), block, at_once=bool(flags))

    def write(self) -> None:
        """Writes everything that has come, so that it outlives this process."""
        self._log.write()

    def flush(self) -> None:
        """Writes everything that has come."""
        self._log.flush()

    def close(self) -> None:
        """Writes everything that has come and finishes the segment. What comes later begins another one."""
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
            except WireError:
                arrays = 0
            self._log.describe(description_of(consumer, arrays))


def description_of(consumer: Consumer, arrays: int) -> TapDescriptor:
    """What a tap is, as far as it can be told; its messages bring so many arrays."""
    try:
        if consumer.describe is not None:
            described = consumer.describe()
            described.pack()
            return described
    except ValueError:
        pass  # said below as far as it can be
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


def _unstacked(message: Message) -> list[list[Any]]:
    if not message.stacked:
        return [list(message.arrays)]
    return [[row(array, k) for array in message.arrays] for k in range(message.stacked)]


def _as_seen(
    described: TapDescriptor, arrays: list[Any], message: Message
) -> tuple[TapDescriptor, list[Any]]:
    # The frames of such taps begin with a shard record. A whole has none; a shard gets one that tells its place.
    consumer_id = (described.consumer_id + _AS_SINKS_SEE) % 2**64
    if message.shard_index is None:
        return replace(described, consumer_id=consumer_id, shards=None), arrays
    places = [
        ([part.stop for part in place], [part.start for part in place]) for place in message.shard_index
    ]
    record = shard_record(places, shards=1, group=0, partition=0)
    described = replace(described, consumer_id=consumer_id + 1, shards="some", sharding="local")
    return described, [np.array(record, np.int64), *arrays]


def record(
    path: str | os.PathLike[str],
    *,
    segment_bytes: int = SEGMENT_BYTES,
    segment_sec: float = SEGMENT_SEC,
    keep_bytes: int | None = None,
    compress: bool = False,
    fsync: bool = False,
    process_index: int | None = None,
    job: str = "",
) -> Recorder:
    """A recorder that writes to a log in the folder `path`: for `outfeed_receiver(record=...)`, or as a sink.

    Messages are in the file after 100 ms at most, failures of checks at once. Several processes may write into one
    folder. Close it, or use it in a `with` block, to have the last segment finished; without that it is read as well.

    Args:
        path: the folder; made if there is none.
        segment_bytes: when a file is so long the next one is begun.
        segment_sec: the same, when it was begun so many seconds ago.
        keep_bytes: delete this process's oldest files when all are longer than this together; None to keep all.
        compress: compress messages with zstd (`pip install 'hostcallback[zstd]'`).
        fsync: wait with each write until it is on the disk: the log then outlives a crash of the machine.
        process_index: this process's number in a program of several, for whoever reads the logs.
        job: names one life of that program, alike in all its processes: readers put its arrays together by it.

    Raises:
        OSError: the folder or the first file in it cannot be made.
        TapLogError: `compress` without the package zstandard.
        ValueError: a size or a time is not positive.
    """
    options = LogOptions(segment_bytes, segment_sec, keep_bytes, compress, fsync, process_index, job=job)
    return Recorder(LogWriter(path, options))
