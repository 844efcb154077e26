"""The program runs of several processes whose logs are read together, and the order in which these are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hostcallback.receiver.messages.message import Message, Sink
from hostcallback.receiver.sinks.sharding.multi_process import ProgramRun, ShardStream
from hostcallback.receiver.sinks.sharding.multi_process_tap import ShardOrigin
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor


class LoggedProgramRuns:
    """The program runs that the logs name. One thread. See `hostcallback.receiver.taplog.reading.merge.Order`."""

    def __init__(self, *, keeps_left: bool = False) -> None:
        """No program run is known yet. `keeps_left`: see `ProgramRun`."""
        self._jobs: dict[str, ProgramRun] = {}
        self._keeps_left = keeps_left

    def of(self, writer: Writer) -> ProgramRun | None:
        """The program run that a process was part of; None if its log names none."""
        if not writer.job:
            return None
        if writer.job not in self._jobs:
            self._jobs[writer.job] = ProgramRun(keeps_left=self._keeps_left)
        return self._jobs[writer.job]

    def stream(self, writer: Writer) -> ShardStream | None:
        """The stream of shards that a process brings to its program run; None if its log names none."""
        job = self.of(writer)
        if job is None:
            return None
        return ShardStream(job, writer, process_of(writer), _any, _unmarked, _as_it_is)

    def is_paused(self, writer: Writer, devices: int) -> bool:
        """Whether a process with that many devices is too far ahead of the others, and must wait."""
        job = self._jobs.get(writer.job)
        return job is not None and job.is_paused(writer, devices)

    def evict_oldest(self) -> None:
        """Discards some incomplete values, because all processes that are left wait.

        Raises:
            Exception: a consumer raised it.
        """
        for job in self._jobs.values():
            if job.has_parked:
                job.evict_oldest()

    def finish(self) -> None:
        """Discards all incomplete values: all processes have been read.

        Raises:
            Exception: a consumer raised it.
        """
        for job in self._jobs.values():
            job.discard()

    def discarded(self) -> Counter[str]:
        """Number of discarded values, by tap and reason."""
        return sum((job.discarded for job in self._jobs.values()), Counter[str]())

    def take_left(self) -> Iterator[ShardOrigin]:
        """Origins of the shards of discarded values since the last call."""
        for job in self._jobs.values():
            left, job.left = job.left, []
            yield from left


def process_of(writer: Writer) -> int:
    """Index of a process in its program."""
    return writer.process_index or 0


def is_alone(writer: Writer, writers: Iterable[Writer]) -> bool:
    """Whether none of `writers` is another process of the same program run."""
    return not writer.job or all(
        process_of(other) == process_of(writer) for other in writers if other.job == writer.job
    )


def _any(described: TapDescriptor) -> bool:
    return True


def _unmarked(message: Message) -> None:
    return None


def _as_it_is(message: Message, sink: Sink) -> Sink:
    return sink
