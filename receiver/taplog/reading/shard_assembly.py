"""Assembles the logged messages that are shards of one value, from all processes of a program."""

from __future__ import annotations

from collections.abc import Iterator

from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.sinks.sharding.multi_process_tap import ShardOrigin
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.process_groups import LoggedProgramRuns, process_of


class ShardMerger:
    """Takes shards one by one and yields whole values. One thread.

    Attributes:
        jobs: determines the order in which processes must be read.
    """

    def __init__(self, *, shows_incomplete: bool) -> None:
        """No shard is known yet.

        `shows_incomplete`: whether shards of incomplete values are yielded too, one by one.
        """
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
        job = self.jobs.of(logged.writer)
        if job is None or shard is None or described is None:
            yield logged
            return
        tap = None
        if described.shards == "some" and described.sharding == "global":
            tap = job.tap(described)
        if tap is None or tap.launch_ids_differ:
            yield logged
            return

        def hand_on(whole: Message) -> None:
            self._whole.append(logged._replace(message=whole, shard=None))

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
        self.jobs.finish()
        yield from self.found()
