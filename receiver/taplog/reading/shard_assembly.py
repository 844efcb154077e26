"""Assembles the logged messages that are shards of one value, from all processes of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.sharding.multi_process_tap import ShardOrigin
from hostcallback.receiver.sinks.sharding.shard_record import Shard
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.process_groups import LoggedProgramRuns, process_of
from hostcallback.receiver.taplog.reading.segment_reader import Writer

MAX_INCOMPLETE = 4096
"""Number of incomplete values of one process that are kept; beyond it, the shards of the oldest are yielded."""


class ProcessValues:
    """What one process has of values of several processes: whole values, or its different shards. One thread."""

    def __init__(self) -> None:
        """No shard is known yet."""
        self._parts: dict[tuple[int, int, int, int], list[tuple[LoggedMessage, Shard]]] = {}

    def take(self, logged: LoggedMessage, shard: Shard) -> Iterator[LoggedMessage]:
        """Takes a shard. Yields the whole value after its last shard, and shards that cannot become one."""
        share = shard.layout.share
        if not share.local:
            if not share.is_copy:
                yield logged
            return
        consumer_id = logged.message.consumer.consumer_id
        key = consumer_id, shard.message.run_id, shard.layout.group, shard.occurrence
        parts = self._parts.setdefault(key, [])
        parts.append((logged, shard))
        if len(parts) == share.local:
            whole = _whole(self._parts.pop(key))
            if whole is not None:
                yield whole
        elif len(self._parts) > MAX_INCOMPLETE:
            yield from _apart(self._parts.pop(next(iter(self._parts))))

    def left(self) -> Iterator[LoggedMessage]:
        """Yields the shards of incomplete values: all messages have been taken."""
        for parts in self._parts.values():
            yield from _apart(parts)
        self._parts.clear()


def _apart(parts: list[tuple[LoggedMessage, Shard]]) -> Iterator[LoggedMessage]:
    for logged, shard in parts:
        if not shard.layout.share.is_copy:
            yield logged


def _whole(parts: list[tuple[LoggedMessage, Shard]]) -> LoggedMessage | None:
    parts.sort(key=lambda part: part[1].layout.partition)
    arrays = [
        np.empty(shape, array.dtype)
        for shape, array in zip(parts[0][1].layout.shapes, parts[0][1].arrays, strict=True)
    ]
    for _, shard in parts:
        for array, part, place in zip(arrays, shard.arrays, shard.layout.places, strict=True):
            array[place] = part
    logged = parts[0][0]
    return logged.with_whole(logged.message._replace(arrays=arrays, shard_index=None))


class ShardMerger:
    """Takes shards one by one and yields whole values. One thread.

    Attributes:
        jobs: determines the order in which processes must be read.
    """

    def __init__(
        self, *, shows_incomplete: bool, is_alone: Callable[[Writer], bool] = lambda writer: not writer.job
    ) -> None:
        """No shard is known yet.

        Args:
            shows_incomplete: whether shards of incomplete values are yielded too, one by one.
            is_alone: whether a process's log is read without those of the others of its program run.
        """
        self._is_alone = is_alone
        self._shows_incomplete = shows_incomplete
        self._alone: dict[Writer, ProcessValues] = {}
        self.jobs = LoggedProgramRuns(keeps_left=shows_incomplete)
        self._whole: list[LoggedMessage] = []

    def take(self, logged: LoggedMessage) -> Iterator[LoggedMessage]:
        """Takes a message. Yields it if it is not a shard, or is a shard of its process only.

        Otherwise yields the values that are complete now, as messages of the leading device, and one by one the
        shards of values that cannot become complete.

        Raises:
            ValueError: the message contradicts the other shards.
        """
        described, shard = logged.tap.described, logged.shard
        if shard is None or described is None or described.shards != "some" or described.sharding != "global":
            yield logged
            return
        job = self.jobs.of(logged.writer)
        if job is None or self._is_alone(logged.writer):
            yield from self._alone.setdefault(logged.writer, ProcessValues()).take(logged, shard)
            return
        tap = job.tap(described)
        if tap.launch_ids_differ:
            if not shard.layout.share.is_copy:
                yield logged
            return

        def hand_on(whole: Message) -> None:
            found = logged.with_whole(whole)
            if found is not None:
                self._whole.append(found)

        origin = ShardOrigin(logged.writer, logged.message.device, process_of(logged.writer), logged, hand_on)
        job.add_shard(tap, shard._replace(message=shard.message._replace(device=origin)))
        yield from self.found()

    def found(self) -> Iterator[LoggedMessage]:
        """Yields complete values, and the shards of values that cannot become complete."""
        whole, self._whole = self._whole, []
        yield from whole
        for origin in self.jobs.take_left():
            yield origin.mark

    def finish(self) -> Iterator[LoggedMessage]:
        """Yields the remaining shards one by one: all messages have been taken."""
        if self._shows_incomplete:
            for values in self._alone.values():
                yield from values.left()
        self.jobs.finish()
        yield from self.found()
