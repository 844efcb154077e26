"""The programs of several processes whose logs are read together, and which of these are to be read on first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from receiver.messages.message import Message, Sink
from receiver.sinks.sharding.multi_process import ProgramRun, ShardStream
from receiver.sinks.sharding.multi_process_tap import ShardOrigin
from receiver.taplog.reading.segment_reader import Writer
from receiver.wire.tap_descriptor import TapDescriptor


class LoggedProgramRuns:
    """The jobs, by what the logs say of them. One thread. See `receiver.taplog.reading.merge.Order`."""

    def __init__(self, *, keeps_left: bool = False) -> None:
        """Knows of none. `keeps_left`: see `ProgramRun`."""
        self._jobs: dict[str, ProgramRun] = {}
        self._keeps_left = keeps_left

    def of(self, writer: Writer) -> ProgramRun | None:
        """The job that a process was part of; None if its log names none."""
        if not writer.job:
            return None
        if writer.job not in self._jobs:
            self._jobs[writer.job] = ProgramRun(keeps_left=self._keeps_left)
        return self._jobs[writer.job]

    def stream(self, writer: Writer) -> ShardStream | None:
        """What a process brings to the job's values."""
        job = self.of(writer)
        if job is None:
            return None
        return ShardStream(job, writer, process_of(writer), _any, _unmarked, _as_it_is)

    def is_paused(self, writer: Writer, devices: int) -> bool:
        """Whether a process, which has so many devices, is too far ahead of the others to be read on."""
        job = self._jobs.get(writer.job)
        return job is not None and job.is_paused(writer, devices)

    def evict_oldest(self) -> None:
        """Gives up some of what is incomplete: only processes that are held are left.

        Raises:
            Exception: what consumers raise.
        """
        for job in self._jobs.values():
            if job.has_parked:
                job.evict_oldest()

    def finish(self) -> None:
        """Gives up all that is incomplete: nothing more comes.

        Raises:
            Exception: what consumers raise.
        """
        for job in self._jobs.values():
            job.discard()

    def discarded(self) -> Counter[str]:
        """How many values were given up, by tap and reason."""
        return sum((job.discarded for job in self._jobs.values()), Counter[str]())

    def take_left(self) -> Iterator[ShardOrigin]:
        """Where the shards are from, since the last time, whose values were given up."""
        for job in self._jobs.values():
            left, job.left = job.left, []
            yield from left


def process_of(writer: Writer) -> int:
    """The number of a process in its program."""
    return writer.process_index or 0


def _any(described: TapDescriptor) -> bool:
    return True


def _unmarked(message: Message) -> None:
    return None


def _as_it_is(message: Message, sink: Sink) -> Sink:
    return sink
