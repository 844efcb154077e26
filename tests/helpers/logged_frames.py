"""Taps, blocks of their frames, and the messages that a log then holds: for the tests of logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hostcallback.receiver.messages import Consumer
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from hostcallback.receiver.taplog.writing.log_writer import LogWriter
from hostcallback.receiver.taplog.writing.rotation import LogOptions
from hostcallback.receiver.wire.frame import Flags, encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

LOSS = TapDescriptor(
    name="loss",
    source_line="train.py:12 (step)",
    consumer_id=77,
    kind="tap",
    params={},
    kwargs={"run": 7},
    transforms=(("jvp", {}),),
    tree=["dict", [["value", "loss"], ["value", "step"]], [["array"], ["array"]]],
    shards=None,
    sharding="global",
)
NORM = replace(LOSS, name="norm", consumer_id=2**64 - 5, tree=["array"], transforms=(), kwargs={})
DESCRIBED = {tap.consumer_id: tap for tap in (LOSS, NORM)}

SECOND = 1_000_000_000
BEGIN_NS = 1_700_000_000 * SECOND


def consumer_of(described: TapDescriptor) -> Consumer:
    """The consumer of a described tap."""
    return Consumer(
        described.consumer_id, described.name, described.source_line, print, described.transforms,
        described.kwargs, is_check=described.kind == "check", describe=lambda: described,
    )  # fmt: skip


def frame(
    tap: TapDescriptor, *arrays: Any, seq: int, time_ns: int | None = None, flags: int = 0, run_id: int = 5
) -> bytes:
    """One frame; its time is `seq` seconds after `BEGIN_NS` unless given."""
    return encode_frame(
        list(map(np.asarray, arrays)),
        consumer_id=tap.consumer_id,
        flags=Flags.ORDERED | flags,
        seq=seq,
        time_ns=BEGIN_NS + seq * SECOND if time_ns is None else time_ns,
        run_id=run_id,
    )


def block_of(*frames: bytes) -> FrameBlock:
    """The frames one behind the other."""
    offsets = np.cumsum([0, *map(len, frames[:-1])])
    return FrameBlock(np.frombuffer(bytearray(b"".join(frames)), np.uint8), offsets)


def losses(first: int, count: int, **numbers: int) -> FrameBlock:
    """Messages of the tap LOSS, whose loss and step are their sequence numbers, from `first` on."""
    return block_of(
        *(frame(LOSS, np.float32(k), np.int32(k), seq=k, **numbers) for k in range(first, first + count))
    )


def read(*paths: Path) -> tuple[list[LoggedMessage], list[LostNote], list[Damage]]:
    """All that logs hold."""
    messages: list[LoggedMessage] = []
    lost: list[LostNote] = []
    damaged: list[Damage] = []
    for record in LogReader(paths).records():
        if isinstance(record, LoggedMessage):
            messages.append(record)
        elif isinstance(record, LostNote):
            lost.append(record)
        else:
            damaged.append(record)
    return messages, lost, damaged


def seqs(messages: list[LoggedMessage]) -> list[int]:
    """Their sequence numbers."""
    return [message.message.seq for message in messages]


@contextmanager
def log_in(path: Path, **options: Any) -> Iterator[LogWriter]:
    """A writer of a log, which describes the taps and is closed at the end."""
    log = LogWriter(path, LogOptions(**options))
    for described in DESCRIBED.values():
        log.describe(described)
    try:
        yield log
    finally:
        log.close()
