"""Programs whose devices emit shards, in any order and with losses: for the tests of assembling."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from hostcallback.receiver.errors import IncompleteValueError
from hostcallback.receiver.messages import Consumer, Message
from hostcallback.receiver.sinks.sharding.shard_record import shard_record
from hostcallback.receiver.sinks.sharding.sinks import AssemblingSink
from threads import in_threads

CONSUMER = Consumer(1, "tap", "here:1 (f)", lambda message: None)


GARBAGE = -1.0


Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """Place of a partition's shard in an array."""

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    start: tuple[int, ...]

    def cut(self, whole: Array) -> Array:
        """The shard as a device sends it, padded beyond the whole's end."""
        part = whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.tile, strict=True))]
        tile = np.full(self.tile, GARBAGE, whole.dtype)
        tile[tuple(slice(n) for n in part.shape)] = part
        return tile


@dataclass
class Program:
    """A program over a mesh, of which `groups` run in parallel, and its partitioning of the tapped arrays."""

    mesh: tuple[int, ...]
    groups: int
    shapes: list[tuple[int, ...]]
    axes: list[list[int | None]]  # for each array: the dimension that each mesh axis partitions

    @property
    def shards(self) -> int:
        return math.prod(self.mesh)

    @property
    def partitions(self) -> range:
        return range(self.shards * self.groups)

    def parts(self, partition: int) -> list[Part]:
        place = np.unravel_index(partition % self.shards, self.mesh)
        found = []
        for shape, axes in zip(self.shapes, self.axes, strict=True):
            count, index = [1] * len(shape), [0] * len(shape)
            for size, coordinate, dim in zip(self.mesh, place, axes, strict=True):
                if dim is not None:
                    count[dim], index[dim] = count[dim] * size, index[dim] * size + int(coordinate)
            tile = tuple(-(-size // n) for size, n in zip(shape, count, strict=True))
            found.append(Part(shape, tile, tuple(i * n for i, n in zip(index, tile, strict=True))))
        return found

    def value(self, key: tuple[int, int, int]) -> list[Array]:
        """The whole arrays of a value, all different; `key` is run id, group and occurrence."""
        run_id, group, occurrence = key
        first = 1000.0 * (1000 * (10 * run_id + group) + occurrence)
        return [np.arange(math.prod(s), dtype=np.float64).reshape(s) + first for s in self.shapes]

    def message(
        self, run_id: int, occurrence: int, partition: int, *, time_ns: int = 0, seq: int = 0
    ) -> Message:
        group = partition // self.shards
        parts = self.parts(partition)
        places = [(part.shape, part.start) for part in parts]
        record = shard_record(places, shards=self.shards, group=group, partition=partition)
        record[0] = occurrence
        arrays = [p.cut(a) for p, a in zip(parts, self.value((run_id, group, occurrence)), strict=True)]
        return Message(
            CONSUMER, [np.array(record, np.int64), *arrays], seq, time_ns, run_id, f"device {partition}", None
        )


def scalar_program(devices: int = 2) -> Program:
    """A replicated scalar and a vector in as many parts."""
    return Program((devices,), 1, [(), (devices,)], [[None], [0]])


Key = tuple[int, int, int]


@dataclass
class Collector:
    """A sink that records its input, by run id and the number in the value."""

    program: Program
    messages: list[Message] = field(default_factory=list)

    def __call__(self, message: Message) -> None:
        self.messages.append(message)


class Delivery:
    """Brings messages to an AssemblingSink and keeps account of everything that it reports."""

    def __init__(self, sink: AssemblingSink) -> None:
        self.sink = sink
        self.discarded = 0
        self._lock = threading.Lock()

    def bring(self, message: Message) -> None:
        try:
            self.sink(message)
        except IncompleteValueError as error:
            assert str(error).startswith(f"{error.count} value(s) were given up")
            with self._lock:
                self.discarded += error.count

    def bring_in_threads(self, streams: Iterable[Sequence[Message]]) -> None:
        """Runs every stream on a separate thread; raises their errors."""
        found = list(streams)

        def bring(number: int) -> None:
            for message in found[number]:
                self.bring(message)

        in_threads(bring, len(found))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    mesh = tuple(
        draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 8))
    )
    shapes = [
        tuple(s) for s in draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=3))
    ]
    axes = [[draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh] for shape in shapes]
    return Program(mesh, draw(st.integers(1, 2)), shapes, axes)


@dataclass
class Story:
    """The messages that the devices of a program emit, and the subset that arrives.

    Attributes:
        streams: by partition, the messages that arrive.
        whole: the values of which all shards arrive.
        broken: the values of which only some shards arrive.
    """

    program: Program
    streams: dict[int, list[Message]]
    whole: set[Key]
    broken: set[Key]

    def interleaved(self, rng: random.Random) -> list[Message]:
        """All messages, those of one device in order; some devices are far ahead of others."""
        rest = {p: iter(stream) for p, stream in self.streams.items()}
        order = []
        while rest:
            partition = rng.choice(list(rest))
            for _ in range(rng.choice([1, 1, 2, 30])):
                message = next(rest[partition], None)
                if message is None:
                    del rest[partition]
                    break
                order.append(message)
        return order


def tell(program: Program, launches: Sequence[tuple[int, int]], rng: random.Random, loss: float) -> Story:
    """A story in which each device runs `launches`, (run id, number of values), one after the other.

    A run id may come back: its occurrences go on, as the devices count them, and not always by one.
    """
    occurrences = {run_id: itertools.accumulate(itertools.repeat(0), lambda o, _: o + rng.choice([1, 1, 1, 3]))
                   for run_id, _ in launches}  # fmt: skip
    emitted = [(run_id, next(occurrences[run_id])) for run_id, count in launches for _ in range(count)]
    streams: dict[int, list[Message]] = {p: [] for p in program.partitions}
    arrived: dict[Key, int] = {}
    for time, (run_id, occurrence) in enumerate(emitted):
        for partition in program.partitions:
            if rng.random() >= loss:
                stream = streams[partition]
                stream.append(program.message(run_id, occurrence, partition, seq=len(stream), time_ns=time))
                key = (run_id, partition // program.shards, occurrence)
                arrived[key] = arrived.get(key, 0) + 1
    whole = {key for key, count in arrived.items() if count == program.shards}
    return Story(program, streams, whole, set(arrived) - whole)


@st.composite
def stories(draw: st.DrawFn, max_values: int = 12) -> tuple[Story, random.Random]:
    program = draw(programs())
    launches = draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, max_values)), min_size=1, max_size=5)
    )
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    return tell(program, launches, rng, draw(st.sampled_from([0.0, 0.05, 0.3, 0.7]))), rng


def identify(collector: Collector, candidates: Iterable[Key]) -> list[Key]:
    """The values that were handed on, in order; each must be one of the candidates, whole and right."""
    program = collector.program
    left = {key: program.value(key) for key in candidates}
    found = []
    for message in collector.messages:
        group = int(message.device.removeprefix("device ")) // program.shards
        matches = [
            key
            for key, whole in left.items()
            if key[:2] == (message.run_id, group)
            and all(np.array_equal(a, b) for a, b in zip(message.arrays, whole, strict=True))
        ]
        assert matches, "a value was handed on twice, or not as it was"
        # Values without elements look alike: then the first one is meant.
        found.append(min(matches))
        del left[found[-1]]
    return found


def messages_of(
    program: Program, partition: int, values: Iterable[tuple[int, int]], *, time_ns: int = 0
) -> list[Message]:
    """The messages of one device; `values` are run ids and occurrences."""
    return [program.message(run_id, occurrence, partition, time_ns=time_ns) for run_id, occurrence in values]


def scan(steps: int, run_id: int = 1) -> list[tuple[int, int]]:
    """One launch that emits many values."""
    return [(run_id, step) for step in range(steps)]


class Gate:
    """A sink that reports that it was called, and returns when it is told to."""

    def __init__(self, log: list[str], name: str, error: BaseException | None = None) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self._log, self._name, self._error = log, name, error

    def __call__(self, message: Message) -> None:
        self._log.append(f"{self._name} begins")
        self.entered.set()
        assert self.open.wait(60)
        self._log.append(f"{self._name} ends")
        if self._error is not None:
            raise self._error


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread
