"""What one message of JetStream brings: messages of one tap on one device, with all it takes to store them anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from receiver.remote.errors import BadStreamError
from receiver.remote.nats.subjects import subject
from receiver.remote.streams import StreamKey
from receiver.taplog.format.block import FrameBlock
from receiver.taplog.format.errors import Lost
from receiver.taplog.reading.merge import LostRun, MessageRun
from receiver.wire import Flags, WireError, decode_header
from receiver.wire.dtypes import Array
from receiver.wire.tap_descriptor import TapDescriptor

VERSION = 1
LINE_BYTES = 64
"""Frames begin and end at multiples of this."""

_RING_ONLY = np.uint64(int(Flags.EXTERNAL | Flags.PAD | Flags.DISCARDED | Flags.BUSY))


@dataclass(slots=True)
class Publication:
    """Messages of one tap out of one batch of a device; or a note that some were lost, without messages.

    Attributes:
        key: the stream they are of.
        writer: who emitted them, as segments say it.
        device: its name.
        block: the messages.
        steps: the step of each.
        folded: pairs of a sequence number and how many failures of the same check were left out before it.
        described: the consumers, by id, as far as they are known.
        batch: first sequence number of the batch.
        part: which of its taps this is, and
        parts: how many it has.
        lost: what is missing.
        tag: the tap's name.
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

    @property
    def subject(self) -> str:
        """Where it is published."""
        return subject(self.key.run, self.key.process, self.tag)

    @property
    def message_id(self) -> str:
        """By which JetStream and collectors know it again: the numbers of the messages on their device."""
        if self.lost is not None:
            return f"{self.key.epoch}/{self.device}/lost/{self.lost.first_seq}-{self.lost.last_seq}/{self.lost.time_ns}"
        return f"{self.key.epoch}/{self.device}/{int(self.block.seqs[0])}-{int(self.block.seqs[-1])}"

    def encode(self) -> bytes:
        """As it is published."""
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
            "offsets": _packed(self.block.offsets),
            "frames": self.block.data.tobytes(),
        }
        data: bytes = msgpack.packb(fields)
        return data

    @classmethod
    def decode(cls, data: bytes) -> Publication:
        """Reverses `encode`.

        Raises:
            BadStreamError: it is none.
        """
        try:
            return cls._decode(msgpack.unpackb(data))
        except BadStreamError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException, WireError) as error:
            raise BadStreamError(f"{len(data)} bytes are no messages of taps: {error!r}") from error

    @classmethod
    def _decode(cls, fields: dict[str, Any]) -> Publication:
        # It comes from outside: nothing is taken for granted.
        if fields["v"] != VERSION:
            raise BadStreamError(
                f"messages are of version {str(fields['v'])[:20]}, this collector knows {VERSION}"
            )
        run, process, epoch = fields["stream"]
        data = np.frombuffer(bytearray(fields["frames"]), np.uint8)
        offsets = np.frombuffer(fields["offsets"], "<i8").astype(np.int64)
        steps = np.frombuffer(fields["steps"], "<i8").astype(np.int64)
        block = FrameBlock(data, offsets)
        if len(steps) != len(offsets):
            raise ValueError("the columns do not go together")
        if len(offsets):
            _check(block)
        lost = None if fields["lost"] is None else Lost(**fields["lost"])
        if (lost is None) == (not len(offsets)) or not isinstance(fields["device"], str):
            raise ValueError("neither messages nor a note, or both")
        described = [TapDescriptor.unpack(item) for item in fields["described"]]
        batch, part, parts = map(int, fields["batch"])
        return cls(
            StreamKey(run, process, epoch),
            _known(fields["writer"]),
            fields["device"], block, steps,
            [(int(seq), int(count)) for seq, count in fields["folded"]],
            {found.consumer_id: found for found in described},
            batch, part, parts, lost, str(fields["tag"]),
        )  # fmt: skip


def _check(block: FrameBlock) -> None:
    # That it is made of frames, one behind the other.
    offsets, size = block.offsets, block.data.size
    ends = np.append(offsets[1:], size)
    if offsets[0] or size % LINE_BYTES or (offsets % LINE_BYTES).any() or (ends <= offsets).any():
        raise ValueError("no frames one behind the other")
    decode_header(block.data)
    lines = block.data.reshape(-1, LINE_BYTES)[offsets // LINE_BYTES]
    if (lines[:, :4] != lines[0, :4]).any() or (block.flags & _RING_ONLY).any():
        raise ValueError("a frame does not begin as frames do")
    up = np.uint64(LINE_BYTES - 1)
    nbytes = LINE_BYTES + ((block.meta_bytes + up) & ~up) + ((block.payload_bytes + up) & ~up)
    if (nbytes != (ends - offsets).astype(np.uint64)).any():
        raise ValueError("a frame is not as long as it says")


def units_of(
    key: StreamKey, run: MessageRun, local_devices: dict[str, int], max_bytes: int
) -> Iterator[Publication]:
    """The messages of a run by tap; no unit has more bytes of frames, unless one message has.

    Removes what it takes from `run.folded`.
    """
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
            int(block.seqs[0]), number, len(places), None, tag,
        )  # fmt: skip


def unit_of_lost(key: StreamKey, found: LostRun, local_devices: dict[str, int]) -> Publication:
    """A note that messages are missing."""
    nothing = FrameBlock(np.empty(0, np.uint8), np.empty(0, np.int64))
    writer, none = _writer(found, local_devices), np.empty(0, np.int64)
    return Publication(key, writer, found.lost.device, nothing, none, lost=found.lost, tag="lost")


def gathered(block: FrameBlock, places: Array) -> FrameBlock:
    """The messages at these places, in this order, in memory of their own."""
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
        stop = max(start + 1, int(np.searchsorted(total, before + max_bytes, "right")))
        yield places[start:stop]
        start = stop


def _writer(run: MessageRun | LostRun, local_devices: dict[str, int]) -> dict[str, Any]:
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
