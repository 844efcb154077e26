"""Stored streams of one program's processes, with shards of arrays: for the tests of assembling."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collecting import LOSS
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.taplog.format.block import FrameBlock
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from hostcallback.receiver.wire.frame import Flags, encode_frame
from hostcallback.receiver.wire.tap_descriptor import TapDescriptor

JOB = "0123456789abcdef0123456789abcdef"
PARTS = replace(LOSS, name="parts", consumer_id=501, tree=["array"], shards="some")
OTHERS = replace(PARTS, name="others", consumer_id=502)
ALONE = replace(PARTS, name="alone", consumer_id=503, shards=None)
TAPS = {tap.consumer_id: tap for tap in (PARTS, OTHERS, ALONE)}
SECOND = 1_000_000_000


def whole_of(number: int, length: int) -> np.ndarray[Any, Any]:
    """The value that the program taps for the `number`th time."""
    return np.arange(length, dtype=np.float64) + 1000.0 * number


class StoredProcess:
    """One process's stream, with as many devices as are wanted.

    Attributes:
        key: of the stream.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        *,
        processes: int = 2,
        devices: int = 1,
        job: str = JOB,
        part: int = 2,
        base: int = 7,
        clock_ns: int = 0,
    ) -> None:
        """Begins it.

        Args:
            store: has the folder.
            number: of the process.
            processes: how many there are.
            devices: how many each of them has.
            job: names the run of the program.
            part: the length of a shard.
            base: the run id of the program's first launch.
            clock_ns: its clock at the first launch.
        """
        self.key = StreamKey("run", number, uuid.uuid4().hex[:16])
        self._devices, self._shards, self._part = devices, processes * devices, part
        self._base, self._clock_ns = base, clock_ns
        self._seqs = [0] * devices
        folder = store.folder("run")
        folder.mkdir(exist_ok=True)
        self._segment = SegmentWriter(
            folder / self.key.segment_name(1),
            info={"process": self.key.epoch, "process_index": number, "job": job, "run": "run",
                  "stream_process": number, "local_devices": {f"cpu:{n}": n for n in range(devices)}},
        )  # fmt: skip

    @property
    def stored(self) -> StreamOffset:
        """How far it is stored."""
        return StreamOffset(1, self._segment.nbytes)

    def store(
        self, launches: Iterable[int], taps: Sequence[TapDescriptor] = (PARTS,), device: int = 0
    ) -> None:
        """In each of some launches a device has sent a message of each tap."""
        frames = [self._frame(tap, launch, device) for launch in launches for tap in taps]
        offsets = np.cumsum([0, *map(len, frames[:-1])])
        block = FrameBlock(np.frombuffer(bytearray(b"".join(frames)), np.uint8), offsets)
        self._segment.frames(f"cpu:{device}", block, TAPS)

    def bring(self, delivery: Delivery, launches: Iterable[int], *args: Any, **kwargs: Any) -> None:
        """The same, and the collector is told."""
        self.store(launches, *args, **kwargs)
        delivery.grown(self.key, self.stored)

    def lose(self, device: int = 0) -> None:
        """A message of a device was dropped."""
        self._seqs[device] += 1

    def _frame(self, tap: TapDescriptor, launch: int, device: int) -> bytes:
        seq = self._seqs[device]
        self._seqs[device] += 1
        partition = self.key.process * self._devices + device
        length, start = self._shards * self._part, partition * self._part
        array = whole_of(launch, length)[start : start + self._part]
        record = [0, self._shards, 0, partition, length, start]
        arrays = [array] if tap.shards is None else [np.array(record, np.int64), array]
        return encode_frame(
            arrays, consumer_id=tap.consumer_id, flags=Flags.ORDERED, seq=seq, run_id=self._base + launch,
            time_ns=self._clock_ns + launch * SECOND,
        )  # fmt: skip


class Taken:
    """A sink that keeps its input.

    Attributes:
        wholes: name, device and array of each message in order.
    """

    def __init__(self) -> None:
        self.wholes: list[tuple[str, str, np.ndarray[Any, Any]]] = []
        self.parts = 0

    def __call__(self, message: Message) -> None:
        self.parts += message.shard_index is not None
        self.wholes.append((message.consumer.name, str(message.device), message.arrays[0]))

    def numbers(self, name: str = "parts") -> list[int]:
        """Numbers of a tap's delivered values, checked to equal the tapped values."""
        found = []
        for tap, _, array in self.wholes:
            if tap == name:
                number = int(array[0] // 1000)
                np.testing.assert_array_equal(array, whole_of(number, len(array)))
                found.append(number)
        return found
