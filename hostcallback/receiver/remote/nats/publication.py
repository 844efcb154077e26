"""Publications: the messages of one tap on one device as one JetStream message, with all that storing them needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from hostcallback.receiver.errors import BadStreamError, WireError
from hostcallback.receiver.remote.forwarding_protocol import StreamKey
from hostcallback.receiver.remote.nats.connection import subject
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.format.layout import Lost
from hostcallback.receiver.taplog.reading.merge import LostNote, Stretch
from hostcallback.receiver.wire.array_types import Array
from hostcallback.receiver.wire.frame import Flags, decode_header
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

VERSION = 1
LINE_BYTES = 64
"""Frames start and end at multiples of this."""

_RING_ONLY = np.uint64(int(Flags.EXTERNAL | Flags.PAD | Flags.DISCARDED | Flags.BUSY))

INVALID = ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError
"""What damaged fields raise."""


@dataclass(slots=True)
class Publication:
    """Messages of one tap from one batch of a device; or, without messages, a note that some were lost.

    Attributes:
        key: the stream of the messages.
        writer: the emitting process, as segments describe it.
        device: its name.
        block: frames of the messages.
        steps: step of each message, int64, shape (messages,).
        folded: pairs of a sequence number and the count of failures of the same check that were left out before it.
        described: known descriptors, by consumer id.
        batch: first sequence number of the batch.
        part: index of this publication in the batch.
        parts: number of publications of the batch.
        lost: the lost messages, in a note.
        tag: name of the tap.
        begins: whether a launch is known to begin with the batch.
    """

    key: StreamKey
    writer: dict[str, Any]
    device: str
    block: FrameBlock
    steps: Array
    folded: list[tuple[int, int]] = field(default_factory=list)
    described: dict[int, TapDescriptor] = field(default_factory=dict)
    batch: int = 0
    part: int = 0
    parts: int = 1
    lost: Lost | None = None
    tag: str = ""
    begins: bool = False

    @property
    def subject(self) -> str:
        """Subject to which it is published."""
        return subject(self.key.run, self.key.process, self.tag)

    @property
    def message_id(self) -> str:
        """Id by which JetStream and collectors recognize duplicates: device and range of the messages' numbers."""
        if self.lost is not None:
            return f"{self.key.epoch}/{self.device}/lost/{self.lost.first_seq}-{self.lost.last_seq}/{self.lost.time_ns}"
        return f"{self.key.epoch}/{self.device}/{int(self.block.seqs[0])}-{int(self.block.seqs[-1])}"

    def encode(self) -> bytes:
        """Encodes the publication as msgpack."""
        fields = {
            "v": VERSION,
            "stream": [self.key.run, self.key.process, self.key.epoch],
            "writer": self.writer,
            "device": self.device,
            "steps": _packed(self.steps),
            "folded": self.folded,
            "described": [described.pack().tobytes() for described in self.described.values()],
            "batch": [self.batch, self.part, self.parts],
            "lost": None if self.lost is None else self.lost._asdict(),
            "tag": self.tag,
            "begins": self.begins,
            "offsets": _packed(self.block.offsets),
            "frames": self.block.data.tobytes(),
        }
        data: bytes = msgpack.packb(fields)
        return data

    @classmethod
    def decode(cls, data: bytes) -> Publication:
        """Reverses `encode`.

        Raises:
            BadStreamError: the data is not a publication.
        """
        try:
            return cls._decode(msgpack.unpackb(data))
        except BadStreamError:
            raise
        except (*INVALID, msgpack.UnpackException, WireError) as error:
            raise BadStreamError(f"{len(data)} bytes are not messages of taps: {error!r}") from error

    @classmethod
    def _decode(cls, fields: dict[str, Any]) -> Publication:
        # The data comes from outside this process, so every field is checked.
        if fields["v"] != VERSION:
            raise BadStreamError(
                f"messages have version {str(fields['v'])[:20]}, this collector knows {VERSION}"
            )
        run, process, epoch = fields["stream"]
        if not isinstance(fields["frames"], bytes):  # a number would be a length
            raise TypeError(f"the frames are a {type(fields['frames']).__name__}")
        data = np.frombuffer(bytearray(fields["frames"]), np.uint8)
        offsets = np.frombuffer(fields["offsets"], "<i8").astype(np.int64)
        steps = np.frombuffer(fields["steps"], "<i8").astype(np.int64)
        block = FrameBlock(data, offsets)
        if len(steps) != len(offsets):
            raise ValueError("the columns have different lengths")
        if len(offsets):
            _check(block)
        lost = None if fields["lost"] is None else Lost(**fields["lost"])
        if (lost is None) == (not len(offsets)) or not isinstance(fields["device"], str):
            raise ValueError("expected either messages or a note of lost ones")
        described = [TapDescriptor.unpack(item) for item in fields["described"]]
        batch, part, parts = map(int, fields["batch"])
        return cls(
            StreamKey(run, process, epoch),
            _known(fields["writer"]),
            fields["device"], block, steps,
            [(int(seq), int(count)) for seq, count in fields["folded"]],
            {found.consumer_id: found for found in described},
            batch, part, parts, lost, str(fields["tag"]), fields.get("begins") is True,
        )  # fmt: skip


def _check(block: FrameBlock) -> None:
    # Checks that the block consists of frames without gaps.
    offsets, size = block.offsets, block.data.size
    ends = np.append(offsets[1:], size)
    if offsets[0] or size % LINE_BYTES or (offsets % LINE_BYTES).any() or (ends <= offsets).any():
        raise ValueError("the frames have gaps, or overlap")
    decode_header(block.data)
    # One header is decoded; the others must have the same magic bytes and version. Decoding each would cost more than
    # everything else here.
    lines = block.data.reshape(-1, LINE_BYTES)[offsets // LINE_BYTES]
    if (lines[:, :4] != lines[0, :4]).any() or (block.flags & _RING_ONLY).any():
        raise ValueError("a frame does not start with a frame's header")
    up = np.uint64(LINE_BYTES - 1)
    nbytes = LINE_BYTES + ((block.meta_bytes + up) & ~up) + ((block.payload_bytes + up) & ~up)
    if (nbytes != (ends - offsets).astype(np.uint64)).any():
        raise ValueError("a frame's length differs from its header's")


def publications_of(
    key: StreamKey, run: Stretch, local_devices: dict[str, int], max_bytes: int, *, begins: bool = False
) -> Iterator[Publication]:
    """Splits the messages of a run by tap. A publication exceeds `max_bytes` of frames only if one message does.
    Removes the counts that it takes from `run.folded`. `begins`: whether a launch is known to begin with the run.
    """
    # By tap, because the tap's name is part of the subject: subscribers choose taps without decoding messages.
    block = run.block.part(run.start, run.stop)
    steps = run.steps[run.start : run.stop]
    writer = _writer(run, local_devices)
    by_tag: dict[str, list[int]] = {}
    for consumer_id in block.consumers:
        described = run.described.get(consumer_id)
        by_tag.setdefault(described.name if described is not None else f"{consumer_id:#018x}", []).append(
            consumer_id
        )
    places: list[tuple[str, Array]] = []
    for tag, ids in by_tag.items():
        mask = np.isin(block.consumer_ids, np.array(ids, np.uint64))
        places += [(tag, part) for part in _parts(block, np.flatnonzero(mask), max_bytes)]
    for number, (tag, part) in enumerate(places):
        seqs = block.seqs[part].tolist()
        yield Publication(
            key, writer, run.device, gathered(block, part), steps[part],
            [(seq, run.folded.pop(seq)) for seq in seqs if seq in run.folded],
            {i: run.described[i] for i in by_tag[tag] if i in run.described},
            int(block.seqs[0]), number, len(places), None, tag, begins,
        )  # fmt: skip


def publication_of_lost(key: StreamKey, found: LostNote, local_devices: dict[str, int]) -> Publication:
    """Returns a note of lost messages."""
    nothing = FrameBlock(np.empty(0, np.uint8), np.empty(0, np.int64))
    writer, none = _writer(found, local_devices), np.empty(0, np.int64)
    return Publication(key, writer, found.lost.device, nothing, none, lost=found.lost, tag="lost")


def gathered(block: FrameBlock, places: Array) -> FrameBlock:
    """Copies the messages at `places` (integer indices) into a new block, in that order."""
    ends = np.append(block.offsets[1:], block.data.size)
    lines = (ends - block.offsets)[places] // LINE_BYTES
    offsets = np.concatenate([[0], np.cumsum(lines)])
    first = np.repeat(block.offsets[places] // LINE_BYTES - offsets[:-1], lines)
    data = block.data.reshape(-1, LINE_BYTES)[first + np.arange(offsets[-1])]
    return FrameBlock(data.reshape(-1), offsets[:-1] * LINE_BYTES)


def _parts(block: FrameBlock, places: Array, max_bytes: int) -> Iterator[Array]:
    ends = np.append(block.offsets[1:], block.data.size)
    total = np.cumsum((ends - block.offsets)[places])
    start = 0
    while start < len(places):
        before = int(total[start - 1]) if start else 0
        # At least one message, even if it alone exceeds the limit.
        stop = max(start + 1, int(np.searchsorted(total, before + max_bytes, "right")))
        yield places[start:stop]
        start = stop


def _writer(run: Stretch | LostNote, local_devices: dict[str, int]) -> dict[str, Any]:
    found = run.writer
    return {
        "host": found.host,
        "pid": found.pid,
        "process_index": found.process_index,
        "job": found.job,
        "local_devices": local_devices,
    }


def _known(writer: dict[str, Any]) -> dict[str, Any]:
    found = {name: writer.get(name) for name in ("host", "pid", "process_index", "local_devices")}
    return {**found, "job": writer.get("job", "")}


def _packed(column: Array) -> bytes:
    return column.astype("<i8").tobytes()
