"""Puts the messages of a log together that are shards of one value, of all processes of a program."""

from __future__ import annotations

from collections.abc import Iterator

from receiver.messages.message import Message
from receiver.sinks.sharding.multi_process_tap import ShardOrigin
from receiver.taplog.reading.logged_message import LoggedMessage
from receiver.taplog.reading.process_groups import LoggedProgramRuns, process_of


class ShardMerger:
    """Shards go in one by one, whole values come out. One thread.

    Attributes:
        jobs: tells in which order processes are to be read.
    """

    def __init__(self, *, shows_incomplete: bool) -> None:
        """Nothing has come yet. `shows_incomplete`: whether shards of values that cannot become whole come out, too."""
        self.jobs = LoggedProgramRuns(keeps_left=shows_incomplete)
        self._whole: list[LoggedMessage] = []

    def take(self, logged: LoggedMessage) -> Iterator[LoggedMessage]:
        """What there is to show after a message: itself if it is no shard, or shards of its process only.

        Otherwise the values that are whole now, as messages of the device that leads; and, by themselves, the shards of
        values that cannot become so.

        Raises:
            ValueError: the message does not go with others.
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
        """What has become whole, and what never will."""
        whole, self._whole = self._whole, []
        yield from whole
        for origin in self.jobs.take_left():
            yield origin.mark

    def finish(self) -> Iterator[LoggedMessage]:
        """What is left, by itself: nothing more comes."""
        self.jobs.finish()
        yield from self.found()
