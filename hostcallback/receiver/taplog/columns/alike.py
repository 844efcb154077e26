"""Reads the messages of a log, many of one tap and layout at a time, without decoding them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver.errors import WireError
from hostcallback.receiver.sinks.call import WHOLE_ID
from hostcallback.receiver.taplog.format.block import FrameBlock, alike_groups, even_stride, words_of
from hostcallback.receiver.taplog.format.errors import Damage
from hostcallback.receiver.taplog.format.layout import NO_STEP
from hostcallback.receiver.taplog.reading.logged_message import Leaf, LoggedMessage, LoggedTap, MessageDecoder
from hostcallback.receiver.taplog.reading.merge import Stretch
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.reading.segment_reader import Writer
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.decoder import Decoder, Plan
from hostcallback.receiver.wire.frame import Flags
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor
from hostcallback.receiver.wire.truncation import stack_of_one

_TRUNCATED = np.uint64(int(Flags.TRUNCATED))
FEW = 8
"""Fewer alike messages are decoded one by one."""

Wants = Callable[[TapDescriptor | None, str], bool]
"""Whether a tap is wanted, by its descriptor and name."""


class AlikeMessages(NamedTuple):
    """Messages of one tap, device and layout.

    Attributes:
        tap: their tap.
        writer: the process that logged them.
        device: the device's name.
        steps: int64, shape (messages,); `NO_STEP` for messages without a step.
        times_ns: emission times, Unix nanoseconds, int64, shape (messages,).
        seqs: sequence numbers on the device, uint64, shape (messages,).
        launches: of the program, int64, shape (messages,).
        folded: numbers of failures of the same check that were left out before each, uint64, shape (messages,).
        arrays: each array of all messages, shape (messages, *shape); a `TruncatedArray` if a rule truncated it.
        places: of each array its position in the whole array, if that was partitioned over devices; else None.
    """

    tap: LoggedTap
    writer: Writer
    device: str
    steps: Array
    times_ns: Array
    seqs: Array
    launches: Array
    folded: Array
    arrays: list[Array]
    places: tuple[tuple[slice, ...], ...] | None = None

    @property
    def messages(self) -> int:
        """Number of messages."""
        return len(self.steps)

    @property
    def layout(self) -> Any:
        """Equal for messages of one tap whose arrays have equal dtypes and shapes."""
        leaves = [(leaf.array.dtype, leaf.array.shape[1:], leaf.whole_shape) for leaf in self.leaves]
        return self.tap, self.places is None, *leaves

    @property
    def leaves(self) -> list[Leaf]:
        """The arrays by name."""
        return self.tap.leaves(self.arrays, self.places)

    @classmethod
    def one(cls, logged: LoggedMessage) -> AlikeMessages:
        """A decoded message."""
        message = logged.message
        numbers = (
            np.array([NO_STEP if logged.step is None else logged.step], np.int64),
            np.array([message.time_ns], np.int64),
            np.array([message.seq], np.uint64),
            np.array([message.run_id], np.int64),
            np.array([logged.folded], np.uint64),
        )
        arrays = [stack_of_one(array) for array in message.arrays]
        return cls(
            logged.tap, logged.writer, str(message.device), *numbers, arrays, message.shard_index
        )  # fmt: skip


class AlikeReader:
    """Reads message runs. One thread."""

    def __init__(self) -> None:
        """No tap is known yet."""
        self._decoder = Decoder()
        self._taps = MessageDecoder()

    def read(self, reader: LogReader, selection: Selection) -> Iterator[AlikeMessages | Damage]:
        """Yields the messages of a log as the devices sent them, by time, with damage in its place."""
        for record in reader.message_runs(selection):
            if isinstance(record, Stretch):
                yield from self.of_run(record, lambda described, name: selection.wants_name(name))
            elif isinstance(record, Damage):
                yield record

    def of_run(self, run: Stretch, wants: Wants) -> Iterator[AlikeMessages | Damage]:
        """Yields the wanted messages of a run, those of a tap and layout together."""
        block = run.block.part(run.start, run.stop)
        parts: list[tuple[int, Array]] = []
        for consumer_id in block.consumers:
            described = run.described.get(consumer_id)
            if described is None or wants(described, described.name):
                where = np.flatnonzero(block.consumer_ids == consumer_id)
                parts += ((consumer_id, places) for places in alike_groups(block, where))
        for consumer_id, places in sorted(parts, key=lambda part: int(part[1][0])):
            plan, is_described = self._plan(block, places), consumer_id in run.described
            if plan is None or not (is_described or consumer_id == WHOLE_ID):
                yield from self._one_by_one(run, places, wants)
                continue
            groups = (
                iter([(places, self._taps.tap(run, consumer_id))])
                if is_described
                else self._exported(block, places, plan)
            )
            own = 0 if is_described else 1  # arrays that are no leaves
            for same, tap in groups:
                if tap is None or tap.mask is not None or tap.records is not None:
                    yield from self._one_by_one(run, same, wants)
                elif wants(tap.described, tap.consumer.name):
                    yield _stacked(run, block, same, tap, array_views(block, same, plan)[own:])

    def _plan(self, block: FrameBlock, places: Array) -> Plan | None:
        if len(places) < FEW or (block.flags[places] & _TRUNCATED).any():
            return None
        try:
            plan = self._decoder.plan(block.data, int(block.offsets[places[0]]))
        except WireError:
            return None
        fits = plan.stackable and plan.payload_bytes == int(block.payload_bytes[places[0]])
        return plan if fits else None

    def _one_by_one(self, run: Stretch, places: Array, wants: Wants) -> Iterator[AlikeMessages | Damage]:
        for place in (places + run.start).tolist():
            for logged in self._taps.messages(run._replace(start=place, stop=place + 1)):
                if isinstance(logged, Damage):
                    yield logged
                elif wants(logged.tap.described, logged.message.consumer.name):
                    yield AlikeMessages.one(logged)

    def _exported(
        self, block: FrameBlock, places: Array, plan: Plan
    ) -> Iterator[tuple[Array, LoggedTap | None]]:
        # Messages of exported programs carry their tap's descriptor as the first array: those of each descriptor.
        # None for one that is not valid.
        descriptions = np.ascontiguousarray(array_views(block, places, plan)[0])
        while len(places):
            same = (descriptions == descriptions[0]).reshape(len(places), -1).all(axis=1)
            try:
                yield places[same], self._taps.exported(descriptions[0].tobytes())
            except ValueError:
                yield places[same], None
            places, descriptions = places[~same], descriptions[~same]


def _stacked(
    run: Stretch, block: FrameBlock, places: Array, tap: LoggedTap, arrays: list[Array]
) -> AlikeMessages:
    if 2 * sum(array.nbytes for array in arrays) < block.data.nbytes:
        arrays = [array.copy() for array in arrays]  # views would keep the whole block
    seqs = block.seqs[places]
    folded = np.zeros(len(places), np.uint64)
    if run.folded:
        folded[:] = [run.folded.pop(seq, 0) for seq in seqs.tolist()]
    numbers = run.steps[places + run.start], block.times_ns[places], seqs, block.launches[places], folded
    return AlikeMessages(tap, run.writer, run.device, *numbers, arrays)


def array_views(block: FrameBlock, places: Array, plan: Plan) -> list[Array]:
    """The arrays of alike messages, each of shape (messages, *shape)."""
    offsets, count = block.offsets[places], len(places)
    stride = even_stride(offsets)
    if stride:
        payloads = block.data[int(offsets[0]) + plan.payload_start :]
    else:
        words = (plan.payload_bytes + 7) // 8
        payloads = (
            np.ascontiguousarray(words_of(block, places, plan.payload_start, words))
            .view(np.uint8)
            .reshape(-1)
        )
        stride = words * 8
    return list(plan.views(payloads, count, stride))
