"""Counts the messages of a log by tap, without decoding their values, and adds up the times of places."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostcallback.receiver.sinks.call import SHARDS_ID, WHOLE_ID
from hostcallback.receiver.sinks.time_rows import SHOWN_SLOWEST, Times
from hostcallback.receiver.sinks.times import TimeSink
from hostcallback.receiver.taplog.format.layout import NO_STEP, Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage, MessageDecoder
from hostcallback.receiver.taplog.reading.merge import LostNote, Record, Stretch
from hostcallback.receiver.taplog.reading.selection import Selection
from hostcallback.receiver.wire.tap_descriptor import TIME, TapDescriptor


@dataclass(slots=True)
class TapStats:
    """Counts of one tap, over all devices and processes.

    Attributes:
        name: of the tap.
        source_line: of the tap.
        kind: purpose of the tap, the text of a `TapKind`; empty if the log does not describe it.
        messages: number of messages; of checks including folded failures.
        nbytes: of their frames.
        first_time_ns: Unix time of the first one, in nanoseconds.
        last_time_ns: Unix time of the last one, in nanoseconds.
        first_step: smallest step; None if there is none.
        last_step: largest step.
        devices: number of messages by device.
    """

    name: str
    source_line: str
    kind: str
    messages: int = 0
    nbytes: int = 0
    first_time_ns: int = 2**63 - 1
    last_time_ns: int = -(2**63)
    first_step: int | None = None
    last_step: int | None = None
    devices: Counter[str] = field(default_factory=Counter)

    @property
    def messages_per_sec(self) -> float:
        """Rate between the first and the last message; 0 for fewer than two."""
        span = (self.last_time_ns - self.first_time_ns) * 1e-9
        return self.messages / span if span > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Converts the counts to a dict for JSON."""
        return {
            "name": self.name,
            "source_line": self.source_line,
            "kind": self.kind,
            "messages": self.messages,
            "bytes": self.nbytes,
            "messages_per_sec": self.messages_per_sec,
            "first_time_ns": self.first_time_ns,
            "last_time_ns": self.last_time_ns,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "devices": dict(self.devices),
        }

    def add(self, device: str, times_ns: Any, steps: Any, nbytes: int, folded: int) -> None:
        """Adds messages: their times (int64, nanoseconds), steps (int64), total bytes and folded failures."""
        count = len(times_ns) + folded
        self.messages += count
        self.nbytes += nbytes
        self.devices[device] += count
        self.first_time_ns = min(self.first_time_ns, int(times_ns.min()))
        self.last_time_ns = max(self.last_time_ns, int(times_ns.max()))
        known = steps[steps != NO_STEP]
        if known.size:
            low, high = int(known.min()), int(known.max())
            self.first_step = low if self.first_step is None else min(self.first_step, low)
            self.last_step = high if self.last_step is None else max(self.last_step, high)


@dataclass(slots=True)
class LogStats:
    """The result of `gather`.

    Attributes:
        most_slowest: number of the slowest calls or iterations that are kept.
        taps: counts by name, line and kind.
        times: the times of places, by the name of the tap that measured them.
        lost: notes of lost messages.
        damaged: damaged parts.
    """

    most_slowest: int
    taps: dict[tuple[str, str, str], TapStats] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    lost: list[LostNote] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)


def gather(records: Iterable[Record], selection: Selection, most_slowest: int = SHOWN_SLOWEST) -> LogStats:
    """Counts the selected messages of a log. `most_slowest`: see `Times`."""
    found = LogStats(most_slowest)
    decoder = MessageDecoder()
    for record in records:
        if isinstance(record, Damage):
            found.damaged.append(record)
        elif isinstance(record, LostNote):
            found.lost.append(record)
        else:
            _count(found, record, decoder, selection)
    return found


def _count(found: LogStats, run: Stretch, decoder: MessageDecoder, selection: Selection) -> None:
    block = run.block.part(run.start, run.stop)
    steps = run.steps[run.start : run.stop]
    ids, padded = block.consumer_ids, np.uint64(2**64 - 64)
    sizes = (
        64 + ((block.meta_bytes + np.uint64(63)) & padded) + ((block.payload_bytes + np.uint64(63)) & padded)
    )
    for consumer_id in block.consumers:
        places = np.flatnonzero(ids == np.uint64(consumer_id))
        if consumer_id in (WHOLE_ID, SHARDS_ID):
            for place in places.tolist():
                one = run._replace(start=run.start + place, stop=run.start + place + 1)
                _count_exported(found, one, int(sizes[place]), decoder, selection)
            continue
        described = run.described.get(consumer_id)
        tap = _tap(found, described, consumer_id)
        if described is not None and described.tap_kind is TIME:
            _add_times(found, run, described, places.tolist(), decoder)
        folded = 0
        if run.folded:
            folded = sum(run.folded.pop(seq, 0) for seq in block.seqs[places].tolist())
        tap.add(run.device, block.times_ns[places], steps[places], int(sizes[places].sum()), folded)


def _count_exported(
    found: LogStats, run: Stretch, nbytes: int, decoder: MessageDecoder, selection: Selection
) -> None:
    # Messages of exported programs name their tap themselves.
    for message in decoder.messages(run):
        if not isinstance(message, LoggedMessage):
            found.damaged.append(message)
            continue
        consumer = message.message.consumer
        if selection.wants_name(consumer.name):
            tap = _tap(found, message.tap.described, consumer.consumer_id)
            steps = np.array([NO_STEP if message.step is None else message.step])
            tap.add(run.device, np.array([message.message.time_ns]), steps, nbytes, message.folded)


def _add_times(
    found: LogStats, run: Stretch, described: TapDescriptor, places: list[int], decoder: MessageDecoder
) -> None:
    times = found.times.setdefault(described.name, Times(found.most_slowest))
    # What is no message of times is counted, like every other message.
    try:
        sink = TimeSink.of(described)
    except (LookupError, ValueError):
        return
    for place in places:
        one = run._replace(start=run.start + place, stop=run.start + place + 1)
        for logged in decoder.messages(one):
            with contextlib.suppress(LookupError, ValueError):
                if isinstance(logged, LoggedMessage):
                    times.add(
                        sink.seconds(logged.message), step=logged.step, loops=sink.loops(logged.message)
                    )


def _tap(found: LogStats, described: TapDescriptor | None, consumer_id: int) -> TapStats:
    if described is None:
        key = f"consumer {consumer_id:#018x}", "(not described)", ""
    else:
        key = described.name, described.source_line, described.kind
    return found.taps.setdefault(key, TapStats(*key))
