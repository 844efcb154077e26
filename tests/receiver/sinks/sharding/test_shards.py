"""Values whose shards come from several devices are handed on once, whole and in order, or counted as given up once."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from receiver.errors import IncompleteValueError, TapFailure
from receiver.messages.deferred_errors import DeferredErrors, MultipleFailures
from receiver.messages.message import Consumer, Message
from receiver.sinks.sharding import assembly, launches, sinks as shards
from receiver.sinks.sharding.shard_record import MAX_KNOWN, RecordReader, shard_record
from receiver.sinks.sharding.sinks import AssemblingSink, LocalShardSink, shard_sink
from receiver.sinks.sharding.ticket_queue import TicketQueue

CONSUMER = Consumer(1, "tap", "here:1 (f)", lambda message: None)
GARBAGE = -1.0

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """Where a partition's shard of an array lies."""

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
    """A program over a mesh, of which `groups` run side by side: how it partitions the tapped arrays."""

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
    """A sink that remembers what it was given, by run id and what the value says of itself."""

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
        """Every stream on a thread of its own; raises what they raised."""
        failures: list[BaseException] = []

        def run(stream: Sequence[Message]) -> None:
            try:
                for message in stream:
                    self.bring(message)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Threads that take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def wait_for(state: Callable[[], bool]) -> None:
    """Waits until another thread has brought the state about; the test's own timeout bounds it."""
    tick = threading.Event()
    while not state():
        tick.wait(0.001)


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
    """What the devices of a program emit, and which of it arrives.

    Attributes:
        streams: by partition, what arrives.
        whole: the values of which all shards arrive.
        broken: those of which some do, and some do not.
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


def key_of(message: Message) -> Key:
    """Which value a message says it is."""
    record = message.arrays[0]
    return message.run_id, int(record[2]), int(record[0])


def identify(collector: Collector, candidates: Iterable[Key]) -> list[Key]:
    """Which values were handed on, in order; each must be one of the candidates, whole and right."""
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


@given(stories())
def test_values_come_once_whole_and_in_order_and_the_others_are_counted_once(told: Any) -> None:
    story, rng = told
    collector = Collector(story.program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    completed = []
    missing = dict.fromkeys(story.whole, story.program.shards)
    for message in story.interleaved(rng):
        delivery.bring(message)
        key = key_of(message)
        if key in missing:
            missing[key] -= 1
            if not missing[key]:
                completed.append(key)
        assert len(collector.messages) == len(completed)  # no later than with its last shard
    assert identify(collector, story.whole) == completed
    assert delivery.discarded + sink.pending_values == len(story.broken)
    for message in collector.messages:
        for array in message.arrays:
            assert array.flags.writeable
        assert message.shard_index is None


@given(stories())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_when_every_device_has_its_thread(impatient_threads: None, told: Any) -> None:
    story, _ = told
    collector = Collector(story.program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    handed_on = identify(collector, story.whole)
    assert set(handed_on) == story.whole
    for launch in {key[:2] for key in handed_on}:
        occurrences = [key[2] for key in handed_on if key[:2] == launch]
        assert occurrences == sorted(occurrences)
    assert delivery.discarded + sink.pending_values == len(story.broken)


@given(stories(max_values=4), st.integers(1, 4))
@settings(max_examples=50)
def test_later_launches_leave_nothing_behind(told: Any, overtaken_by: int) -> None:
    story, rng = told
    program = story.program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "OVERTAKEN_BY", overtaken_by)
        patch.setattr(assembly, "OVERTAKEN_NS", 5)
        collector = Collector(program)
        sink = AssemblingSink(collector)
        delivery = Delivery(sink)
        later = tell(program, [(run_id, 1) for run_id in range(100, 120)], rng, 0.0)
        in_step = tell(program, [(run_id, 1) for run_id in range(200, 300)], rng, 0.0)
        order = [
            *story.interleaved(rng),
            *later.interleaved(rng),
            *itertools.chain(*zip(*in_step.streams.values(), strict=True)),
        ]
        for time, message in enumerate(order):
            delivery.bring(message._replace(time_ns=time))
        assert delivery.discarded == len(story.broken)
        whole = story.whole | later.whole | in_step.whole
        assert set(identify(collector, whole)) == whole
        kept = sink._assembly
        assert (kept.pending_values, kept.pending_bytes, kept.unfinished) == (0, 0, 0)
        assert len(kept) < 60 * program.groups


def messages_of(
    program: Program, partition: int, values: Iterable[tuple[int, int]], *, time_ns: int = 0
) -> list[Message]:
    """What one device emits; `values` are run ids and occurrences."""
    return [program.message(run_id, occurrence, partition, time_ns=time_ns) for run_id, occurrence in values]


def scan(steps: int, run_id: int = 1) -> list[tuple[int, int]]:
    """One launch that emits many values."""
    return [(run_id, step) for step in range(steps)]


@pytest.mark.parametrize(
    "values", [scan(300), [(run_id, 0) for run_id in range(300)]], ids=["scan", "launches"]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_device_may_be_hundreds_of_values_ahead(devices: int, values: list[tuple[int, int]]) -> None:
    program = scalar_program(devices)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for partition in reversed(program.partitions):
        for message in messages_of(program, partition, values):
            sink(message)
    assert identify(collector, {(run_id, 0, o) for run_id, o in values}) == [
        (run_id, 0, o) for run_id, o in values
    ]
    assert sink.pending_values == 0


def test_nothing_is_lost_when_devices_run_launches_in_different_orders() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    one, other = scan(50, run_id=1), scan(50, run_id=2)
    for message in messages_of(program, 0, [*one, *other]) + messages_of(program, 1, [*other, *one]):
        sink(message)
    assert len(identify(collector, {(r, 0, o) for r, o in [*one, *other]})) == 100


@pytest.mark.parametrize(("device_index", "expected"), [(0, 1), (1, 1), (2, 2), (7, 1)])
def test_the_whole_is_said_to_come_from_one_device(device_index: int, expected: int) -> None:
    # As in the second group of a partially manual program, whose first partition is not 0.
    got: list[Message] = []
    sink = AssemblingSink(got.append, device_index)
    for partition in (3, 2, 1):
        record = np.array(shard_record([], shards=3, group=0, partition=partition), np.int64)
        sink(Message(CONSUMER, [record], 10 * partition, 20 * partition, 5, f"device {partition}", None))
    assert got == [Message(CONSUMER, [], 10 * expected, 20 * expected, 5, f"device {expected}", None)]


def test_a_sink_may_keep_and_change_what_it_gets() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for message in messages_of(program, 0, scan(3)) + messages_of(program, 1, scan(3)):
        sink(message)
    for message in collector.messages:
        for array in message.arrays:
            array[...] = 7
    arrays = [array for message in collector.messages for array in message.arrays]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)


def test_values_that_were_handed_on_are_not_kept_however_long_the_launch() -> None:
    others = [o for o in gc.get_objects() if type(o) is launches.Value]  # of other tests
    program = scalar_program(2)
    sink = AssemblingSink(lambda message: None)
    ahead, behind = messages_of(program, 0, scan(500)), messages_of(program, 1, scan(500))
    sink(ahead[0])
    for message, other in zip(ahead[1:], behind[:-1], strict=True):  # device 1 is always one behind
        sink(message)
        sink(other)
    gc.collect()
    known = {id(o) for o in others}
    kept = [
        o for o in gc.get_objects() if type(o) is launches.Value and o.occurrence >= 0 and id(o) not in known
    ]
    assert len(kept) < 6
    assert sink.pending_values == 1


def test_a_long_backlog_is_freed_without_exhausting_the_stack() -> None:
    program = scalar_program(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "MAX_PENDING_VALUES", 10**6)
        sink = AssemblingSink(lambda message: None)
        message = program.message(1, 0, 0)
        for occurrence in range(100_000):
            record = message.arrays[0].copy()
            record[0] = occurrence
            sink(message._replace(arrays=[record, *message.arrays[1:]]))
        assert sink.pending_values == 100_000
    del sink


# Order among taps, and what their failures leave behind


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


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_value_waits_for_those_completed_before_it_and_no_longer(error: BaseException | None) -> None:
    program = scalar_program(2)
    log: list[str] = []
    slow = Gate(log, "slow", error)
    first, second = AssemblingSink(slow), AssemblingSink(lambda message: log.append("next"))
    raised: list[BaseException | None] = []

    def complete_first() -> None:
        try:
            first(program.message(1, 0, 0))
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    first(program.message(1, 0, 1))
    second(program.message(1, 0, 0))
    a = in_thread(complete_first)
    assert slow.entered.wait(60)
    b = in_thread(lambda: second(program.message(1, 0, 1)))
    wait_for(lambda: len(shards.turns) == 2)
    # A device whose shards complete nothing goes on meanwhile, on this thread.
    for message in messages_of(program, 0, scan(20, run_id=2)):
        first(message)
        second(message)
    assert b.is_alive()
    slow.open.set()
    a.join()
    b.join()
    assert log == ["slow begins", "slow ends", "next"]
    assert raised == [error]
    assert len(shards.turns) == 0


@pytest.mark.usefixtures("impatient_threads")
def test_taps_of_one_program_are_called_in_program_order() -> None:
    program = scalar_program(4)
    called: list[tuple[str, int]] = []
    running = threading.Lock()

    def tap(name: str) -> Callable[[Message], None]:
        def call(message: Message) -> None:
            assert running.acquire(blocking=False), "two taps ran at once"
            called.append((name, message.run_id))
            running.release()

        return call

    sinks = {name: AssemblingSink(tap(name)) for name in "abc"}

    def device(partition: int) -> Callable[[], None]:
        def run() -> None:
            for run_id in range(150):
                for sink in sinks.values():
                    sink(program.message(run_id, 0, partition))

        return run

    threads = [in_thread(device(partition)) for partition in program.partitions]
    for thread in threads:
        thread.join()
    assert called == [(name, run_id) for run_id in range(150) for name in "abc"]


def test_a_failing_tap_does_not_hide_what_was_given_up() -> None:
    program = scalar_program(2)

    def fail(message: Message) -> None:
        raise KeyError("no")

    sink = AssemblingSink(fail)
    for occurrence in (0, 1, 2, 3):
        sink(program.message(1, occurrence, 0))
    with pytest.raises(MultipleFailures) as info:
        sink(program.message(1, 3, 1))
    assert [type(error) for error in info.value.exceptions] == [KeyError, IncompleteValueError]
    deferred = DeferredErrors()
    deferred.add_failure(TapFailure(info.value, "tap", "here:1 (f)", "cpu:1", 7))
    report = deferred.take()
    assert report is not None
    assert [type(failure.exception) for failure in report.failures] == [KeyError]
    (incomplete,) = [error for error in report.exceptions if isinstance(error, IncompleteValueError)]
    assert incomplete.count == 3
    assert str(incomplete).startswith(
        "3 value(s) of arrays that lie on several devices were given up, 3 of the tap tap at here:1 (f)"
    )


def test_however_many_values_are_given_up_one_error_tells() -> None:
    deferred = DeferredErrors(max_kept=2)
    for count, tap in ((1, "a"), (5, "b"), (2, "a")) * 50:
        deferred.add_failure(TapFailure(IncompleteValueError("", count), tap, "x:1 (f)", "cpu:0", 0))
    report = deferred.take()
    assert report is not None
    (error,) = report.exceptions
    assert isinstance(error, IncompleteValueError)
    assert error.count == 400
    assert "250 of the tap b at x:1 (f), 150 of the tap a at x:1 (f)" in str(error)
    assert not report.suppressed
    assert deferred.take() is None


def test_turns_come_in_the_order_of_the_tickets_also_when_some_are_given_back_early() -> None:
    turns = TicketQueue()
    first, second, third = (turns.issue() for _ in range(3))
    log: list[str] = []

    def wait(ticket: object, name: str) -> None:
        turns.wait(ticket)
        log.append(name)

    thread = in_thread(lambda: wait(third, "third"))
    wait(first, "first")
    turns.release(second)
    assert thread.is_alive()
    turns.release(first)
    thread.join()
    assert log == ["first", "third"]
    turns.release(third)
    assert len(turns) == 0


def test_a_forked_child_does_not_wait_for_turns_of_its_parent() -> None:
    program = """if True:
        import os, sys
        import numpy as np
        from receiver.messages.message import Message
        from receiver.sinks.sharding.shard_record import shard_record
        from receiver.sinks.sharding.sinks import AssemblingSink, turns

        def hand_on(name):
            record = np.array(shard_record([], shards=1, group=0, partition=0), np.int64)
            AssemblingSink(lambda message: print(name, flush=True))(Message(None, [record], 0, 0, 0, "d", None))

        mine, others = turns.issue(), turns.issue()
        pid = os.fork()  # as a tap function may
        if pid == 0:
            turns.release(mine)
            hand_on("child")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        turns.release(mine)
        turns.release(others)
        hand_on("parent")
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("child\nparent\n", "")


# Back-pressure


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few values."""
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 8)


def watch_most(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most that assemblies held at any time, from here on."""
    most = {"unfinished": 0, "pending_values": 0}
    add = assembly.Assembly.add

    def watched(self: Any, shard: Any) -> Any:
        try:
            return add(self, shard)
        finally:
            for name in most:
                most[name] = max(most[name], getattr(self, name))

    monkeypatch.setattr(assembly.Assembly, "add", watched)
    return most


@pytest.mark.usefixtures("small", "impatient_threads")
@pytest.mark.parametrize("devices", [2, 4])
def test_devices_ahead_wait_and_nothing_is_lost(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = scalar_program(devices)
    launches = [(1, 400), *((run_id, 1) for run_id in range(2, 200)), (1000, 400)]
    story = tell(program, launches, random.Random(0), 0.0)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    most = watch_most(monkeypatch)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    assert set(identify(collector, story.whole)) == story.whole
    assert (delivery.discarded, sink.pending_values) == (0, 0)
    assert most["unfinished"] <= 8
    assert not sink._waiting


@pytest.mark.slow
@pytest.mark.usefixtures("small", "impatient_threads")
@pytest.mark.parametrize("devices", [2, 4])
def test_memory_is_bounded_also_when_much_is_lost(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.05)
    program = scalar_program(devices)
    story = tell(program, [(run_id, 100) for run_id in range(10)], random.Random(0), 0.2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    most = watch_most(monkeypatch)
    delivery = Delivery(sink)
    delivery.bring_in_threads(story.streams.values())
    handed_on = identify(collector, story.whole)
    # Where there is room for all of them this would be an equality.
    assert len(handed_on) + delivery.discarded + sink.pending_values <= len(story.whole) + len(story.broken)
    assert most["unfinished"] <= 4 * 8
    assert most["pending_values"] <= 2 * 8
    assert not sink._waiting


@pytest.mark.usefixtures("small")
def test_devices_that_run_launches_in_different_orders_go_on_for_each_other() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    one, other = scan(8, run_id=1), scan(8, run_id=2)
    first = in_thread(lambda: [sink(m) for m in messages_of(program, 0, [*one, *other])] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    for count, message in enumerate(messages_of(program, 1, other), 1):
        sink(message)
        wait_for(lambda count=count: len(collector.messages) == count)
    for message in messages_of(program, 1, one):
        sink(message)
    first.join()
    assert len(identify(collector, {(r, 0, o) for r, o in [*one, *other]})) == 16


@pytest.mark.usefixtures("small")
def test_a_device_ahead_goes_on_as_soon_as_the_others_have_caught_up() -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    ahead = in_thread(lambda: [sink(m) for m in messages_of(program, 0, scan(100))] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    assert sink.pending_values == 8
    for message in messages_of(program, 1, scan(100)):
        sink(message)
    ahead.join()
    assert len(identify(collector, {(1, 0, o) for o in range(100)})) == 100


def test_the_bytes_of_pending_values_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "MAX_PENDING_BYTES", 3 * 8 * 1000)
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.0)
    program = Program((2,), 1, [(1000,)], [[0]])
    sink = AssemblingSink(Collector(program))
    delivery = Delivery(sink)
    for message in messages_of(program, 0, scan(100)):
        delivery.bring(message)
        assert sink._assembly.pending_bytes == 8000 * sink.pending_values <= 3 * 8000
    assert delivery.discarded + sink.pending_values == 100
    # One that exceeds the bound by itself comes through alone.
    monkeypatch.setattr(assembly, "MAX_PENDING_BYTES", 1)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    for occurrence in range(3):
        for partition in program.partitions:
            sink(program.message(1, occurrence, partition))
    assert len(collector.messages) == 3


@pytest.mark.usefixtures("small")
def test_a_device_that_stands_still_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.01)
    program = scalar_program(3)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    delivery = Delivery(sink)
    waits = []
    wait = sink._changed.wait
    monkeypatch.setattr(sink._changed, "wait", lambda timeout: waits.append(timeout) or wait(timeout))

    def go_on(first: int) -> None:
        for step in range(first, first + 100):
            for partition in (0, 1):
                delivery.bring(program.message(1, step, partition))
            assert sink._assembly.unfinished <= 8

    go_on(0)
    assert waits
    assert all(timeout <= 0.01 for timeout in waits)
    waited = len(waits)
    go_on(100)
    assert len(waits) == waited
    discarded = delivery.discarded
    assert discarded + sink.pending_values == 200
    # What it brings late was counted already; what is still pending it completes, and from then on all is well.
    for step in range(200):
        delivery.bring(program.message(1, step, 2))
    assert delivery.discarded == discarded
    assert identify(collector, {(1, 0, o) for o in range(200)}) == [(1, 0, o) for o in range(discarded, 200)]
    for step in range(200, 300):
        for partition in program.partitions:
            delivery.bring(program.message(1, step, partition))
    assert (delivery.discarded, sink.pending_values) == (discarded, 0)
    assert len(collector.messages) == 300 - discarded
    # Whoever has come again is waited for again.
    waits.clear()
    go_on(300)
    assert waits


@pytest.mark.usefixtures("small")
def test_nothing_is_given_up_while_a_tap_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.001)
    program = scalar_program(2)
    slow = Gate([], "slow")
    sink = AssemblingSink(slow)
    looks = 0
    wait = sink._changed.wait

    def counted(timeout: float) -> bool:
        nonlocal looks
        looks += 1
        return wait(timeout)

    monkeypatch.setattr(sink._changed, "wait", counted)
    sink(program.message(1, 0, 0))
    behind = in_thread(lambda: [sink(m) for m in messages_of(program, 1, scan(50))] and None)
    assert slow.entered.wait(60)
    ahead = in_thread(lambda: [sink(m) for m in messages_of(program, 0, scan(50)[1:])] and None)
    wait_for(lambda: looks > 20)  # many times as long as it would wait otherwise
    assert sink.pending_values == 8
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 60)  # a loaded machine may take its time
    slow.open.set()
    ahead.join()
    behind.join()
    assert sink._assembly.finished == 50
    assert sink._assembly.discarded == 0


@pytest.mark.usefixtures("small")
def test_nothing_is_given_up_while_other_receivers_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.001)
    program = scalar_program(2)
    looks = 0
    busy = threading.Event()

    def is_another_receiver_busy() -> bool:
        nonlocal looks
        looks += 1
        return not busy.is_set()

    collector = Collector(program)
    sink = AssemblingSink(collector, 0, is_another_receiver_busy)
    delivery = Delivery(sink)
    ahead = in_thread(lambda: [delivery.bring(m) for m in messages_of(program, 0, scan(50))] and None)
    wait_for(lambda: looks > 20)
    assert (sink.pending_values, delivery.discarded) == (8, 0)
    # From then on the other device has nothing more to deliver.
    busy.set()
    ahead.join()
    assert delivery.discarded + sink.pending_values == 50
    assert not shards.waiting_threads


@pytest.mark.usefixtures("small")
def test_a_tap_that_never_returns_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUSY_STANDSTILL_SEC", 0.01)
    program = scalar_program(2)
    slow = Gate([], "slow")
    sink = AssemblingSink(slow)
    sink(program.message(1, 0, 0))
    behind = in_thread(lambda: sink(program.message(1, 0, 1)))
    assert slow.entered.wait(60)
    delivery = Delivery(sink)
    for message in messages_of(program, 0, scan(50)[1:]):
        delivery.bring(message)
    assert delivery.discarded + sink.pending_values == 49
    slow.open.set()
    behind.join()


@given(stories(), st.integers(1, 6))
def test_without_time_to_wait_memory_is_bounded_and_nothing_comes_twice_or_wrong(
    told: Any, most: int
) -> None:
    story, rng = told
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "MAX_PENDING_VALUES", most)
        patch.setattr(shards, "STANDSTILL_SEC", 0.0)
        collector = Collector(story.program)
        sink = AssemblingSink(collector)
        delivery = Delivery(sink)
        for message in story.interleaved(rng):
            delivery.bring(message)
            assert sink._assembly.unfinished <= 4 * most
            assert sink.pending_values <= 2 * most
        handed_on = identify(collector, story.whole)
        for launch in {key[:2] for key in handed_on}:
            occurrences = [key[2] for key in handed_on if key[:2] == launch]
            assert occurrences == sorted(occurrences)
        accounted = len(handed_on) + delivery.discarded + sink.pending_values
        assert accounted <= len(story.whole) + len(story.broken)


@pytest.mark.usefixtures("small")
def test_values_that_are_lost_already_are_noted_without_waiting_and_not_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = scalar_program(3)
    sink = AssemblingSink(lambda message: None)
    delivery = Delivery(sink)
    for occurrence in (0, 1000):
        delivery.bring(program.message(1, occurrence, 0))
    with monkeypatch.context() as patch:
        patch.setattr(sink._changed, "wait", lambda timeout: pytest.fail("waited"))
        for step in range(30):
            delivery.bring(program.message(1, step, 1))
    assert (delivery.discarded, sink.pending_values, sink._assembly.unfinished) == (29, 2, 31)
    monkeypatch.setattr(shards, "STANDSTILL_SEC", 0.0)
    for step in range(30, 200):
        delivery.bring(program.message(1, step, 1))
        assert sink._assembly.unfinished <= 32
    assert delivery.discarded + sink.pending_values == 201


# Launches that end with values of which shards were lost


def test_values_that_later_launches_have_overtaken_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "OVERTAKEN_NS", 1000)
    program = scalar_program(2)
    sink = AssemblingSink(lambda message: None)
    delivery = Delivery(sink)
    delivery.bring(program.message(0, 0, 0, time_ns=0))

    def launch(first: int, count: int, time_ns: int, partitions: Iterable[int]) -> int:
        for run_id in range(first, first + count):
            for partition in partitions:
                delivery.bring(program.message(run_id, 0, partition, time_ns=time_ns))
        return delivery.discarded

    # By launches that not all devices have begun it is not overtaken, however old it is.
    assert launch(1, 300, 5000, (0,)) == 0
    assert launch(1, 300, 5000, (1,)) == 0
    assert sink.pending_values == 1
    # The next time that launches are counted it is.
    assert launch(301, 300, 5000, (0, 1)) == 1
    assert sink.pending_values == 0
    # One that is not old may belong to a launch that is slow on one device.
    delivery.bring(program.message(1000, 0, 0, time_ns=5000))
    assert launch(1001, 1000, 6000, (0, 1)) == 1
    delivery.bring(program.message(1000, 0, 1, time_ns=6001))
    assert (delivery.discarded, sink.pending_values, sink._assembly.finished) == (1, 0, 1601)
    # Few later launches do not overtake: XLA may run several at once.
    delivery.bring(program.message(3000, 0, 0, time_ns=6001))
    assert launch(3001, 3, 10000, (0, 1)) == 1
    delivery.bring(program.message(3000, 0, 1, time_ns=10000))
    assert (delivery.discarded, sink.pending_values) == (1, 0)


def test_launches_on_other_devices_overtake_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "OVERTAKEN_NS", 0)
    collector = Collector(scalar_program(2))
    sink = AssemblingSink(collector)
    sink(collector.program.message(0, 0, 0))
    for run_id in range(1, 100):
        for partition in (0, 1):
            message = collector.program.message(run_id, 0, partition, time_ns=10)
            sink(message._replace(device=f"device {partition + 2}"))
    sink(collector.program.message(0, 0, 1))
    assert len(collector.messages) == 100


def test_full_of_overtaken_values_no_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "OVERTAKEN_BY", 4)
    monkeypatch.setattr(assembly, "MAX_PENDING_VALUES", 16)
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    monkeypatch.setattr(sink._changed, "wait", lambda timeout: pytest.fail("waited"))
    delivery = Delivery(sink)
    for run_id in range(200):
        for partition in (0, 1) if run_id % 2 else (0,):
            delivery.bring(program.message(run_id, 0, partition))
    assert len(collector.messages) == 100
    assert delivery.discarded + sink.pending_values == 100
    assert delivery.discarded > 80


@pytest.mark.parametrize("restart", [False, True], ids=["counted on", "counted anew"])
def test_run_ids_come_back(restart: bool) -> None:
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)
    keys = []
    for time in range(3):
        values = [(run_id, o if restart else o + 3 * time) for run_id in (5, 6) for o in range(3)]
        keys += [(run_id, 0, o) for run_id, o in values]
        for partition in program.partitions:
            for message in messages_of(program, partition, values):
                sink(message)
    for message, key in zip(collector.messages, keys, strict=True):
        np.testing.assert_array_equal(message.arrays[1], program.value(key)[1])


def test_a_launch_whose_id_comes_back_waits_for_the_devices_that_are_not_through_with_the_earlier_one() -> (
    None
):
    program = scalar_program(2)
    collector = Collector(program)
    sink = AssemblingSink(collector)

    def stream(partition: int) -> list[Message]:
        again = [m._replace(arrays=[m.arrays[0], *(a + 0.5 for a in m.arrays[1:])])
                 for m in messages_of(program, partition, scan(3))]  # fmt: skip
        return [*messages_of(program, partition, scan(3)), *again]

    ahead = in_thread(lambda: [sink(message) for message in stream(0)] and None)
    wait_for(lambda: len(sink._waiting) == 1)
    for message in stream(1):
        sink(message)
    ahead.join()
    got = [message.arrays[1].tolist() for message in collector.messages]
    values = [program.value((1, 0, o))[1] for o in range(3)]
    assert got == [*(v.tolist() for v in values), *((v + 0.5).tolist() for v in values)]


# What does not go together


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ([], "came without arrays"),
        ([np.zeros(3, np.int64)], r"expected int64 of shape \(4,\)"),
        ([np.zeros((), np.int64)], r"dtype int64 and shape \(\)"),
        ([np.array([0, 1, 0, 0], np.int32)], "dtype int32"),
        ([np.array([0, 2, 0, 0, 1 << 40, 0]), np.zeros(4)], "2 shards of shape"),
        ([np.array([0, 1, 0, 0]), np.zeros(2)], r"shapes \[\(2,\)\], expected int64 of shape \(6,\)"),
        ([np.array([0, 1, 0, 0, 2, 0])], "different versions"),
        ([np.array([0, 0, 0, 0])], "at least one shard"),
        ([np.array([0, 1, 0, -1])], "partition -1"),
        ([np.array([0, 1, 0, 0, 2, -2]), np.zeros(2)], "nothing negative"),
        ([np.array([0, 1, 0, 0, -2, 2]), np.zeros(2)], "nothing negative"),
        ([np.array([-1, 2, 0, 0])], "occurrence -1"),
    ],
)
def test_damaged_records_are_refused(arrays: list[Array], text: str) -> None:
    sink = AssemblingSink(lambda message: pytest.fail("was handed on"))
    message = Message(CONSUMER, arrays, 0, 0, 0, "device 0", None)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            sink(message)
    assert sink.pending_values == 0
    if "occurrence" not in text and "2 shards of shape" not in text:  # alone these are as good as any
        with pytest.raises(ValueError, match=text):
            LocalShardSink(lambda message: pytest.fail("was handed on"))(message)


def test_shards_of_different_programs_are_not_put_together() -> None:
    one, other = scalar_program(2), Program((2,), 1, [(), (4,)], [[None], [0]])
    collector = Collector(one)
    sink = AssemblingSink(collector)
    sink(one.message(1, 0, 0))
    with pytest.raises(ValueError, match=r"\[\(\), \(4,\)\] came where others were of \[\(\), \(2,\)\]"):
        sink(other.message(1, 0, 1))
    assert (sink.pending_values, sink._assembly.unfinished) == (0, 0)
    stray = one.message(1, 1, 0)
    stray.arrays[0][3] = 7
    with pytest.raises(ValueError, match=r"partition 7 brought one of 2 shards, .* partitions \[0, 1\]"):
        sink(stray)
    for partition in one.partitions:
        sink(one.message(1, 2, partition))
    assert len(collector.messages) == 1


@given(st.lists(st.tuples(*[st.integers(-1, 3)] * 5), max_size=40))
def test_arbitrary_records_are_taken_or_refused(records: list[tuple[int, ...]]) -> None:
    sink = AssemblingSink(lambda message: None)
    for run_id, *record in records:
        message = Message(CONSUMER, [np.array(record)], 0, 0, run_id, f"device {record[3]}", None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "STANDSTILL_SEC", 0.0)
            with contextlib.suppress(ValueError, IncompleteValueError):
                sink(message)
        kept = sink._assembly
        assert 0 <= kept.pending_values <= kept.unfinished <= 40
        assert kept.pending_bytes == 0


# Shards by themselves


@given(programs(), st.data())
def test_shards_come_with_their_place_and_without_padding(program: Program, data: st.DataObject) -> None:
    got: list[Message] = []
    sink = LocalShardSink(got.append)
    partition = data.draw(st.sampled_from(program.partitions))
    message = program.message(3, 1, partition)
    sink(message)
    (delivered,) = got
    assert delivered._replace(arrays=[], shard_index=None) == message._replace(arrays=[])
    assert delivered.shard_index is not None
    whole = program.value((3, partition // program.shards, 1))
    for part, index, array in zip(delivered.arrays, delivered.shard_index, whole, strict=True):
        assert isinstance(part, np.ndarray)
        assert len(index) == array.ndim
        np.testing.assert_array_equal(array[index], part)
        assert all(0 <= s.start <= s.stop <= n for s, n in zip(index, array.shape, strict=True))


def test_records_of_equal_text_with_other_tiles_are_told_apart() -> None:
    reader = RecordReader()
    record = np.array([0, 2, 0, 0, 8, 0])
    for length in (4, 8, 4):
        message = Message(CONSUMER, [record, np.zeros(length)], 0, 0, 0, "device 0", None)
        assert reader.read(message).layout.places == ((slice(0, length),),)


def test_a_reader_does_not_remember_without_bound() -> None:
    reader = RecordReader()
    for size in range(3 * MAX_KNOWN):
        record = np.array([0, max(1, size), 0, 0, size, 0])
        assert reader.read(Message(CONSUMER, [record, np.zeros(1)], 0, 0, 0, "d", None)).layout.shapes == (
            (size,),
        )
    assert len(reader._known) <= MAX_KNOWN


@pytest.mark.parametrize(
    ("sharding", "assemble", "kind"),
    [
        ("global", True, AssemblingSink),
        ("global", False, LocalShardSink),
        ("local", True, LocalShardSink),
        ("local", False, LocalShardSink),
    ],
)
def test_whole_values_take_all_shards_and_the_wish_for_them(
    sharding: str, assemble: bool, kind: type
) -> None:
    assert type(shard_sink(lambda message: None, sharding, assemble=assemble)) is kind
