"""The steps of messages: a message's own, or that of its launch and iteration, if it is known.

A message without a step belongs to the step of its launch on its device. If the launch has several steps, as a scan
has, it belongs to that of its iteration, if these facts show it:

- steps that count by one show the iterations: between two of them, a message belongs to one or the other;
- a tap that sends before the launch's first step comes before the step in each iteration, and belongs to the next one;
- a tap that begins to send between the first two steps, or sends after the last one, belongs to the previous one.
  A check sends only when it fails, and may end the launch: only one that fails again after the last step does;
- a message between two of the same iteration is of that iteration.

In all other cases the message has no step: a wrong one is worse.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostcallback.receiver import errors, limits
from hostcallback.receiver.messages import StepSource, step_place
from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.taplog.format.block import FrameBlock, alike_groups
from hostcallback.receiver.taplog.format.layout import NO_STEP, align
from hostcallback.receiver.wire.array_types import Array, decode_metadata, payload_layout
from hostcallback.receiver.wire.frame import HEADER, Flags
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

MAX_KNOWN = 4096

MAX_SETS = 64
"""Sets of taps of which is remembered that the step of all is the same array."""

INTEGER_CODES = range(2, 10)
"""The wire format's codes of integers of whole bytes, S8 to U64."""

KEPT = 64
"""Messages before a block that are kept, so that the steps of its first launch are found."""

AHEAD_MESSAGES = 8192
"""Messages after a block in which readers look for the steps of its last launch."""

AHEAD_CHUNKS = 64
AHEAD_BYTES = 32 << 20
"""Limits of the chunks after a block that readers read for that."""

_TRUNCATED = np.uint64(int(Flags.TRUNCATED))


class Columns(NamedTuple):
    """What the steps of consecutive messages of one device follow from: arrays with an item per message.

    Attributes:
        launches: launch of the program, int64.
        taps: tells taps apart, uint64.
        steps: the message's own step, int64, or `NO_STEP`.
    """

    launches: Array
    taps: Array
    steps: Array

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        """Joins the columns of messages that follow each other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def at(self, places: Any) -> Columns:
        """The columns of the messages at some places, or in a slice."""
        return Columns(self.launches[places], self.taps[places], self.steps[places])


class Earlier(NamedTuple):
    """What is known of the messages before a block on its device.

    Attributes:
        columns: of the last of them.
        has_start: whether nothing of their first launch is missing that its steps depend on.
    """

    columns: Columns
    has_start: bool

    def and_then(self, here: Columns) -> Earlier:
        """What is known after a block: the last messages, and the first and last step of the last one's launch."""
        around = Columns.join([self.columns, here])
        count = len(around.steps)
        if not count:
            return self
        has_start = self.has_start or bool(around.launches[0] != around.launches[-1])
        if count > KEPT:
            own = np.flatnonzero((around.steps != NO_STEP) & (around.launches == around.launches[-1]))
            kept = {*own[:1].tolist(), *own[-1:].tolist(), *range(count - KEPT, count)}
            around = around.at(np.array(sorted(kept)))
        return Earlier(around, has_start)


NOTHING = Columns(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64))
BEGINNING = Earlier(NOTHING, has_start=True)
UNKNOWN = Earlier(NOTHING, has_start=False)


class Steps(NamedTuple):
    """The steps of the messages of a block.

    Attributes:
        steps: int64, shape (messages,); `NO_STEP` for messages without one.
        need_earlier: whether messages before the block may show more.
        need_later: whether messages after it may show more.
    """

    steps: Array
    need_earlier: bool
    need_later: bool


class StepFinder:
    """Finds the steps of messages, and remembers what launches have shown of their taps. One thread at a time."""

    def __init__(self, described: Mapping[int, TapDescriptor]) -> None:
        """`described` has the known descriptors of the taps by consumer id; it may grow."""
        self._described = described
        self._looked_at = -1
        self._has_steps = False
        self._checks: set[int] = set()
        self._places: dict[int, tuple[StepSource | None, int]] = {}
        self._arrays: dict[
            tuple[int, ...], int
        ] = {}  # by taps: the number of the array that is the step of all
        self._slots: dict[tuple[int, bytes], _Slot | None] = {}  # by array index and metadata
        self._exported: dict[bytes, StepSource | None] = {}
        self._earlier: dict[str, dict[int, Earlier]] = {}
        self._before: set[int] = set()  # taps that precede the step of their iteration
        self._after: set[int] = set()  # taps that follow it
        self._single: set[int] = set()  # taps with a step whose launches had one step
        self._looping: set[int] = set()  # taps with a step whose launches had several

    def in_force(self, block: FrameBlock, before: int) -> Array:
        """For each message its own step or the previous one of its device, int64; at first `before`.

        The headers of chunks have the bounds of these. The step of a message without one is another question.
        """
        steps = self.columns(block).steps
        own = steps != NO_STEP
        last = np.maximum.accumulate(np.where(own, np.arange(len(steps)), -1))
        return np.where(last < 0, before, steps[last])

    def columns(self, block: FrameBlock) -> Columns:
        """Finds the messages' own steps."""
        if not len(block):
            return NOTHING
        steps = np.full(len(block), NO_STEP, np.int64)
        taps = block.consumer_ids
        if (array := self._arrays.get(tuple(block.consumers))) is not None:
            self._fill(block, np.arange(len(block)), array, steps)
            return Columns(block.launches, taps, steps)
        alike: dict[tuple[int, int], list[int]] = {}  # taps whose messages have the step in one place
        for consumer_id in block.consumers:
            if consumer_id in (WHOLE_ID, SHARDS_ID):
                taps = taps.copy() if taps is block.consumer_ids else taps
                self._fill_exported(block, consumer_id, steps, taps)
                continue
            place, before = self._place(consumer_id)
            if place is not None and place.array < 0:
                steps[block.consumer_ids == consumer_id] = place.value
            elif place is not None:
                alike.setdefault((place.array, before), []).append(consumer_id)
        for (array, before), ids in alike.items():
            are_all = len(ids) == len(block.consumers)
            if are_all and len(self._arrays) < MAX_SETS:
                self._arrays[tuple(block.consumers)] = array + before
            where = np.arange(len(block)) if are_all else np.flatnonzero(_is_in(block.consumer_ids, ids))
            self._fill(block, where, array + before, steps)
        return Columns(block.launches, taps, steps)

    def find(
        self,
        here: Columns,
        earlier: Earlier,
        later: Sequence[Columns] = (),
        *,
        is_end: bool = False,
        guess: bool = False,
    ) -> Steps:
        """Finds the steps of the messages of a block.

        Args:
            here: the block's columns.
            earlier: what is known of the messages before it.
            later: the columns of messages after it.
            is_end: whether the log is complete, and no message comes after all these.
            guess: whether a launch that has one step so far counts as ended, if earlier launches of its taps had one.
        """
        if self.are_alone(here):
            return Steps(here.steps, need_earlier=False, need_later=False)
        around = Columns.join([earlier.columns, here, *later])
        first = len(earlier.columns.steps)
        mine = slice(first, first + len(here.steps))
        steps, started, ended = self._of_launches(around, earlier.has_start, is_end, guess)
        open_ones = (steps == NO_STEP)[mine]
        return Steps(
            steps[mine],
            need_earlier=bool((open_ones & ~started[mine]).any()),
            need_later=bool((open_ones & ~ended[mine]).any()),
        )

    def are_alone(self, here: Columns) -> bool:
        """Whether the steps of messages do not follow from others: each has its own, or no tap has one."""
        return not self._may_have_steps(here) or bool((here.steps != NO_STEP).all())

    def as_they_come(self, device: str, block: FrameBlock, step_before: int) -> Array:
        """Finds the steps of the messages of a block, for a reader that does not wait for later ones.

        Args:
            device: the device.
            block: its next messages.
            step_before: the step in force before them, as their chunk's header says.
        """
        columns = self.columns(block)
        known = self._earlier.get(device, {})  # by number of the next message; readers may read a block again
        first, last = int(block.seqs[0]), int(block.seqs[-1])
        earlier = known.get(first) or (BEGINNING if step_before == NO_STEP else UNKNOWN)
        self._earlier[device] = {first: earlier, last + 1: earlier.and_then(columns)}
        return self.find(columns, earlier, guess=True).steps

    def _may_have_steps(self, here: Columns) -> bool:
        if len(self._described) != self._looked_at:
            self._looked_at = len(self._described)
            taps = list(self._described.values())
            self._has_steps = self._has_steps or any(step_place(tap) is not None for tap in taps)
            self._checks.update(tap.consumer_id for tap in taps if tap.tap_kind.is_check)
        if not self._has_steps:  # such as an exported program's
            self._has_steps = bool((here.steps != NO_STEP).any())
        return self._has_steps

    def _of_launches(
        self, around: Columns, has_start: bool, is_end: bool, guess: bool
    ) -> tuple[Array, Array, Array]:
        # Returns the steps, and for each message whether its launch's first and last messages are among these.
        order = np.argsort(around.launches, kind="stable")
        launches, taps, own = around.at(order)
        index = np.arange(len(order))
        firsts = np.flatnonzero(np.append(True, launches[1:] != launches[:-1]))
        stops = np.append(firsts[1:], len(order))
        launch = np.repeat(np.arange(len(firsts)), stops - firsts)
        has_own = own != NO_STEP
        is_free = ~has_own

        # Of each launch: what is known of its extent, and whether it has one step or several.
        started = (order[firsts] > 0) | has_start
        followed = order[stops - 1] < len(order) - 1
        lowest = np.minimum.reduceat(np.where(has_own, own, 2**63 - 1), firsts)
        highest = np.maximum.reduceat(own, firsts)
        is_single, is_looping = lowest == highest, lowest < highest
        _note(self._single, taps[has_own & (is_single & started & followed)[launch]])
        _note(self._looping, taps[has_own & is_looping[launch]])
        ended = followed | is_end
        if guess:
            last = taps[has_own & (is_single & ~followed)[launch]].tolist()
            if last and set(last) <= self._single - self._looping:
                ended |= is_single

        # Of each message: the steps before and after it in its launch.
        before, after = _neighbours(has_own)
        is_past, is_ahead = before >= firsts[launch], after < stops[launch]
        previous, following = own[before], own[np.minimum(after, len(index) - 1)]
        between, opening, closing = is_free & is_past & is_ahead, is_free & ~is_past, is_free & ~is_ahead

        # Of each loop: whether its steps count by one at its beginning and at its end, and where its second step is.
        at = np.flatnonzero(has_own)
        jumps = np.abs(np.diff(own[at]))
        changes = np.flatnonzero((launch[at][1:] == launch[at][:-1]) & (jumps != 0))
        opens, closes = np.zeros((2, len(firsts)), np.bool_)
        second = np.full(len(firsts), -1)
        _, places = np.unique(launch[at][changes], return_index=True)
        begin = changes[places]
        opens[launch[at[begin]]] = jumps[begin] == 1
        second[launch[at[begin]]] = at[begin + 1]
        closes[launch[at[changes]]] = jumps[changes] == 1  # the last one counts
        opens &= started

        lasting = (ended & closes)[launch] & closing
        # A check may have ended the launch, unless it failed before.
        for place in np.flatnonzero(lasting & _is_in(taps, self._checks)).tolist():
            first = firsts[launch[place]]
            lasting[place] = bool((taps[first : before[place]] == taps[place]).any())
        self._learn(
            taps[opening & opens[launch]],
            taps[between & opens[launch] & (after == second[launch])],
            taps[lasting],
        )
        precedes, follows = _is_in(taps, self._before), _is_in(taps, self._after)
        precedes, follows = precedes & ~follows, follows & ~precedes
        is_next = between & (np.abs(following - previous) == 1)
        # What follows the one step of a launch and precedes it in loops is of an iteration whose step is not there.
        single = is_free & (is_single & started & ended)[launch] & ~(is_past & precedes)
        steps = own.copy()
        for chosen, found in (
            (single, lowest[launch]),
            (between & (following == previous), previous),
            (is_next & precedes, following),
            (is_next & follows, previous),
            (opening & opens[launch], following),
            (closing & closes[launch] & (follows | lasting), previous),
        ):
            steps[chosen] = found[chosen]
        # Between two messages of an iteration there are none of another.
        before, after = _neighbours(steps != NO_STEP)
        inside = (steps == NO_STEP) & (before >= firsts[launch]) & (after < stops[launch])
        inside[inside] = steps[before[inside]] == steps[after[inside]]
        steps[inside] = steps[before[inside]]

        sorted_back = np.empty_like(order)
        sorted_back[order] = index
        return steps[sorted_back], started[launch[sorted_back]], ended[launch[sorted_back]]

    def _learn(self, opening: Array, second: Array, lasting: Array) -> None:
        # The taps of messages of loops: before the first step, between it and the second one, and after the last one.
        before, between = Counter(opening.tolist()), Counter(second.tolist())
        # Of a tap with more messages before the first step than after it, the first iterations sent no step.
        _note(self._before, [tap for tap, count in before.items() if not 0 < between[tap] < count])
        _note(self._after, [tap for tap in between if tap not in before and tap not in self._checks])
        _note(self._after, lasting)

    def _fill(self, block: FrameBlock, where: Array, array: int, steps: Array) -> None:
        truncated = (block.flags[where] & _TRUNCATED) != 0
        parts = [(where, array)]
        if truncated.any():  # such a message has a shape record before its arrays
            parts = [(where[~truncated], array), (where[truncated], array + 1)]
        for part, number in parts:
            for alike in alike_groups(block, part):
                slot = self._slot(block.metadata(int(alike[0])), number)
                if slot is not None:
                    steps[alike] = _read(block, alike, slot)

    def _place(self, consumer_id: int) -> tuple[StepSource | None, int]:
        # Also returns the number of arrays before the tapped ones.
        known = self._places.get(consumer_id)
        if known is None:
            described = self._described.get(consumer_id)
            if described is None:
                return None, 0
            known = self._places[consumer_id] = step_place(described), int(described.shards is not None)
        return known

    def _slot(self, metadata: bytes, array: int) -> _Slot | None:
        key = array, metadata
        if key not in self._slots:
            if len(self._slots) >= MAX_KNOWN:
                self._slots.clear()
            self._slots[key] = _slot(metadata, array)
        return self._slots[key]

    def _fill_exported(self, block: FrameBlock, consumer_id: int, steps: Array, taps: Array) -> None:
        # Exported programs' taps have one consumer id, so their descriptions tell them apart.
        sharded = consumer_id == SHARDS_ID
        for index in np.flatnonzero(block.consumer_ids == consumer_id).tolist():
            metadata = block.metadata(index)
            try:
                specs = decode_metadata(metadata)
            except errors.WireError:
                continue
            if len(specs) <= sharded:
                continue
            starts, sizes, _ = payload_layout(specs)
            payload = int(block.offsets[index]) + HEADER.size + align(len(metadata))
            start = payload + starts[sharded]
            description = block.data[start : start + sizes[sharded]].tobytes()
            place = self._place_in(description)
            taps[index] = _number_of(description)
            if place is not None and place.array < 0:
                steps[index] = place.value
            elif place is not None:
                slot = _slot(metadata, place.array + 1 + sharded)
                if slot is not None:
                    steps[index] = _read(block, np.array([index]), slot)[0]

    def _place_in(self, description: bytes) -> StepSource | None:
        if description not in self._exported:
            if len(self._exported) >= MAX_KNOWN:
                self._exported.clear()
            self._exported[description] = None
            with contextlib.suppress(ValueError):
                described = TapDescriptor.unpack(description)
                self._exported[description] = step_place(described)
                if described.tap_kind.is_check:
                    _note(self._checks, [_number_of(description)])
        return self._exported[description]


class _Slot(NamedTuple):
    # Location of the step in a frame.
    offset: int
    dtype: np.dtype[Any]


def _neighbours(chosen: Array) -> tuple[Array, Array]:
    # For each place the last chosen one up to it, or -1, and the first one from it on, or the length.
    index = np.arange(len(chosen))
    before = np.maximum.accumulate(np.where(chosen, index, -1))
    after = np.minimum.accumulate(np.where(chosen, index, len(index))[::-1])[::-1]
    return before, after


def _number_of(description: bytes) -> int:
    return hash(description) & (2**64 - 1)


def _note(known: set[int], taps: Array | list[int]) -> None:
    if len(known) < limits.DESCRIPTIONS:
        known.update(np.unique(taps).tolist() if isinstance(taps, np.ndarray) else taps)


def _is_in(taps: Array, known: Collection[int]) -> Array:
    return np.isin(taps, np.fromiter(known, np.uint64, len(known)))


def _slot(metadata: bytes, array: int) -> _Slot | None:
    try:
        specs = decode_metadata(metadata)
    except errors.WireError:
        return None
    if array >= len(specs):
        return None
    spec = specs[array]
    if spec.shape or spec.type_code not in INTEGER_CODES:
        return None
    offsets, _, _ = payload_layout(specs)
    return _Slot(HEADER.size + align(len(metadata)) + offsets[array], spec.dtype)


def _read(block: FrameBlock, where: Array, slot: _Slot) -> Array:
    at = (block.offsets[where] + slot.offset) // slot.dtype.itemsize
    steps: Array = block.data.view(slot.dtype)[at].astype(np.int64)
    return steps
