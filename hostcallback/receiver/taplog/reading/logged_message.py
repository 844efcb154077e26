"""A message of a log; messages that are shards of one value, assembled from all processes of a program."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import WireError
from hostcallback.receiver.messages import Consumer, Message, StepSource, array_names, step_place
from hostcallback.receiver.sinks.batches import LaneMask
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.sharding.multi_process import ProgramRun, ShardOrigin, ShardStream
from hostcallback.receiver.sinks.sharding.shard_record import PLACES_FROM, RecordReader, Shard
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.wire import array_types, decoder, frame, pytree as tree, tap_descriptor, truncation

_TRUNCATED = int(frame.Flags.TRUNCATED)

MAX_EXPORTED = 4096


class Leaf(NamedTuple):
    """One array of a message, or of several alike messages.

    Attributes:
        name: keys of the leaf, joined by slashes; empty if the array alone was tapped.
        array: its elements; a `hostcallback.receiver.wire.truncation.TruncatedArray` if a rule truncated it.
        place: position in the whole array, if that was partitioned over devices.
    """

    name: str
    array: array_types.Array
    place: tuple[slice, ...] | None

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """Shape of the array that was tapped, if a rule truncated it."""
        return self.array.whole_shape if isinstance(self.array, truncation.TruncatedArray) else None


class LoggedTap:
    """A tap whose messages are in a log.

    Attributes:
        described: its descriptor; None if the log has none.
        mask: says which elements of a batch its messages are of; None if of all.
        consumer: the tap as a consumer whose sink does nothing.
    """

    def __init__(self, consumer_id: int, described: tap_descriptor.TapDescriptor | None) -> None:
        """`described` is None for a consumer without a descriptor in the log."""
        self.described = described
        self.records = RecordReader() if described is not None and described.shards is not None else None
        if described is None:
            self.consumer = Consumer(consumer_id, f"consumer {consumer_id:#018x}", "(not described)", _ignore)
        else:
            self.consumer = Consumer(
                described.consumer_id,
                described.name,
                described.source_line,
                _ignore,
                described.transforms,
                described.kwargs,
                is_check=described.tap_kind.is_check,
                describe=lambda: described,
                unflatten=lambda arrays: self.unflatten(arrays),
            )
        self.mask = None if described is None else LaneMask.of(described.transforms)
        self._names: list[str] = []

    @cached_property
    def step_source(self) -> StepSource | None:
        """Source of the step in its messages; None if they have none."""
        return None if self.described is None else step_place(self.described)

    def is_step(self, index: int, shape: Sequence[int], dtype: Any) -> bool:
        """Whether the array of that index, shape and dtype is the step of its message."""
        return self.step_source is not None and self.step_source.is_at(index, shape, dtype)

    @cached_property
    def unflatten(self) -> Callable[[Sequence[Any]], Any]:
        """Restores the tapped pytree from the arrays of a message."""
        restore = list if self.described is None else tree.unflatten_with(self.described.tree)
        return restore if self.mask is None else self.mask.unflattening(restore)

    def leaf_names(self, count: int) -> list[str]:
        """Names of the `count` arrays of its messages; their indices without a descriptor that fits."""
        if len(self._names) != count:
            self._names = [str(index) for index in range(count)]
            if self.described is not None:
                with contextlib.suppress(ValueError, TypeError):  # a descriptor that does not fit the arrays
                    self._names = array_names(self.described.tap_kind, self.unflatten, count)
        return self._names

    def leaves(
        self, arrays: Sequence[array_types.Array], places: Sequence[tuple[slice, ...]] | None
    ) -> list[Leaf]:
        """The arrays of its messages by name; `places` as in `Message.shard_index`."""
        names = self.leaf_names(len(arrays))
        each = [None] * len(arrays) if places is None else places
        return [Leaf(*item) for item in zip(names, arrays, each, strict=False)]


def _ignore(message: Message) -> None:
    pass


class LoggedMessage(NamedTuple):
    """One message of a log.

    Attributes:
        message: as sinks receive it; the device is a text. Of an array that was partitioned over devices it has the
            device's shard, with its place. The consumer's `describe` returns the tap's descriptor.
        step: the step of the program; None if the message has none.
        folded: number of failures of the same check that were left out before it.
        writer: the process that logged it.
        tap: the log's knowledge of its tap.
        shard: the shard with its place among the others, if an array was partitioned over devices.
    """

    message: Message
    step: int | None
    folded: int
    writer: Writer
    tap: LoggedTap
    shard: Shard | None = None

    def with_whole(self, message: Message) -> LoggedMessage | None:
        """The assembled value whose last shard this was; None if no element of it takes part."""
        mask = self.tap.mask
        whole = message if mask is None else mask.apply(message._replace(elements=None))
        return None if whole is None else self._replace(message=whole, shard=None)

    @property
    def value(self) -> Any:
        """The tapped pytree. (Of `print`, `callback` and the like, a pair of args and kwargs.)

        Raises:
            ValueError: the arrays do not fit the descriptor.
        """
        return self.tap.unflatten(self.message.arrays)

    @property
    def leaves(self) -> list[Leaf]:
        """The tapped arrays by name."""
        return self.tap.leaves(self.message.arrays, self.message.shard_index)

    @property
    def leaves_but_step(self) -> list[Leaf]:
        """The tapped arrays by name, without that which is the step."""
        is_step = self.tap.is_step
        leaves = enumerate(self.leaves)
        return [leaf for index, leaf in leaves if not is_step(index, leaf.array.shape, leaf.array.dtype)]


class MessageDecoder:
    """Decodes message runs, and remembers their taps."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._decoder = decoder.Decoder()
        self._taps: dict[tuple[str, int], LoggedTap] = {}
        self._exported: dict[bytes, LoggedTap] = {}

    def messages(self, run: Stretch) -> Iterator[LoggedMessage | Damage]:
        """Yields the messages of a run in order; a `Damage` for one that cannot be decoded."""
        steps = run.steps[run.start : run.stop].tolist()
        for offset, step in zip(run.block.starts[run.start : run.stop], steps, strict=True):
            try:
                logged = self._message(run, offset, step)
                if logged is not None:
                    yield logged
            except (WireError, ValueError) as error:
                yield Damage(run.path, offset, 0, 1, f"a message cannot be decoded ({error})")

    def _message(self, run: Stretch, offset: int, step: int) -> LoggedMessage | None:
        # None for a message of which no element takes part.
        consumer_id, flags, seq, time_ns, run_id, _, arrays = self._decoder.decode(run.block.data, offset)
        if flags & _TRUNCATED:
            arrays = truncation.split_truncated(arrays, 0)
        tap, arrays = self._tap_of(run, consumer_id, arrays)
        message = Message(tap.consumer, arrays, seq, time_ns, run_id, run.device, None)
        shard = None
        if tap.records is not None:
            shard = tap.records.read(message)
            message = message._replace(arrays=shard.arrays, shard_index=shard.layout.places)
            message = message if tap.mask is None else tap.mask.part(message)
        elif tap.mask is not None:
            taken = tap.mask.apply(message)
            if taken is None:
                return None
            message = taken
        return LoggedMessage(
            message,
            None if step == NO_STEP else step,
            run.folded.pop(seq, 0),
            run.writer,
            tap,
            shard,
        )

    def tap(self, run: Stretch, consumer_id: int) -> LoggedTap:
        """The tap of messages that do not carry their descriptor."""
        key = run.writer.process, consumer_id
        tap = self._taps.get(key)
        if tap is None or tap.described is None:  # a later segment may have the descriptor
            tap = self._taps[key] = LoggedTap(consumer_id, run.described.get(consumer_id))
        return tap

    def exported(self, description: bytes) -> LoggedTap:
        """The tap of messages that carry their descriptor, as those of exported programs do.

        Raises:
            ValueError: the descriptor is invalid.
        """
        tap = self._exported.get(description)
        if tap is None:
            if len(self._exported) >= MAX_EXPORTED:  # each message may bring another descriptor
                self._exported.clear()
            described = tap_descriptor.TapDescriptor.unpack(description)
            tap = self._exported[description] = LoggedTap(described.consumer_id, described)
        return tap

    def _tap_of(self, run: Stretch, consumer_id: int, arrays: list[Any]) -> tuple[LoggedTap, list[Any]]:
        if consumer_id not in (WHOLE_ID, SHARDS_ID):
            return self.tap(run, consumer_id), arrays
        sharded = consumer_id == SHARDS_ID
        if len(arrays) <= sharded:
            raise ValueError("a message of an exported program has no descriptor of its tap")
        tap = self.exported(arrays[sharded].tobytes())
        if not sharded:
            return tap, arrays[1:]
        # The descriptor is an array like the others, so the shard record has a place for it, which is removed.
        record = np.concatenate([arrays[0][:PLACES_FROM], arrays[0][PLACES_FROM + 2 :]])
        return tap, [record, *arrays[2:]]


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
        return ShardStream(
            job, writer, process_of(writer), lambda described: True, lambda message: None, lambda message, sink: sink
        )  # fmt: skip

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


MAX_INCOMPLETE = 4096
"""Number of incomplete values of one process that are kept; beyond it, the shards of the oldest are yielded."""


class ProcessValues:
    """Assembles the shards of one process into whole values where possible. One thread."""

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
