"""A message of a log, and the log's knowledge of its tap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.messages.message import Consumer, Message
from hostcallback.receiver.sinks.exported import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.lane_mask import LaneMask
from hostcallback.receiver.sinks.sharding.shard_record import PLACES_FROM, RecordReader, Shard
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.merge import MessageRun
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.wire import Decoder, Flags, WireError, pytree as tree
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostcallback.receiver.wire.truncation import split_truncated

_TRUNCATED = int(Flags.TRUNCATED)

MAX_EXPORTED = 4096


class LoggedTap:
    """A tap whose messages are in a log.

    Attributes:
        described: its descriptor; None if the log has none.
        mask: says which elements of a batch its messages are of; None if of all.
        consumer: the tap as a consumer whose sink does nothing.
    """

    def __init__(self, consumer_id: int, described: TapDescriptor | None) -> None:
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

    @cached_property
    def unflatten(self) -> Callable[[Sequence[Any]], Any]:
        """Restores the tapped pytree from the arrays of a message."""
        restore = list if self.described is None else tree.unflatten_with(self.described.tree)
        return restore if self.mask is None else self.mask.unflattening(restore)


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


class RunDecoder:
    """Decodes message runs, and remembers their taps."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._decoder = Decoder()
        self._taps: dict[tuple[str, int], LoggedTap] = {}
        self._exported: dict[bytes, LoggedTap] = {}

    def messages(self, run: MessageRun) -> Iterator[LoggedMessage | Damage]:
        """Yields the messages of a run in order; a `Damage` for one that cannot be decoded."""
        steps = run.steps[run.start : run.stop].tolist()
        for offset, step in zip(run.block.starts[run.start : run.stop], steps, strict=True):
            try:
                logged = self._message(run, offset, step)
                if logged is not None:
                    yield logged
            except (WireError, ValueError) as error:
                yield Damage(run.path, offset, 0, 1, f"a message cannot be decoded ({error})")

    def _message(self, run: MessageRun, offset: int, step: int) -> LoggedMessage | None:
        # None for a message of which no element takes part.
        consumer_id, flags, seq, time_ns, run_id, _, arrays = self._decoder.decode(run.block.data, offset)
        if flags & _TRUNCATED:
            arrays = split_truncated(arrays, 0)
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

    def _tap_of(self, run: MessageRun, consumer_id: int, arrays: list[Any]) -> tuple[LoggedTap, list[Any]]:
        if consumer_id not in (WHOLE_ID, SHARDS_ID):
            key = run.writer.process, consumer_id
            tap = self._taps.get(key)
            if tap is None or tap.described is None:  # a later segment may have the descriptor
                tap = self._taps[key] = LoggedTap(consumer_id, run.described.get(consumer_id))
            return tap, arrays
        sharded = consumer_id == SHARDS_ID
        if len(arrays) <= sharded:
            raise ValueError("a message of an exported program has no descriptor of its tap")
        description = arrays[sharded].tobytes()
        tap = self._exported.get(description)
        if tap is None:
            if (
                len(self._exported) >= MAX_EXPORTED
            ):  # each message may bring another descriptor, so they are bounded
                self._exported.clear()
            described = TapDescriptor.unpack(description)
            tap = self._exported[description] = LoggedTap(described.consumer_id, described)
        if not sharded:
            return tap, arrays[1:]
        # The descriptor is an array like the others, so the shard record has a place for it, which is removed.
        record = np.concatenate([arrays[0][:PLACES_FROM], arrays[0][PLACES_FROM + 2 :]])
        return tap, [record, *arrays[2:]]
