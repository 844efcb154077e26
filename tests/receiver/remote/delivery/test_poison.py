"""A message that fails in delivery is set aside, and other streams go on."""

from __future__ import annotations

import signal
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkout import python_path
from hostcallback.receiver import limits
from hostcallback.receiver.failures.check_report import OTHERS, BoundedCounter
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery import cursor, delivery as module, process_groups
from hostcallback.receiver.remote.delivery.cursor import InProgress
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.spool.stream_reader import next_segment
from hostcallback.receiver.taplog.format import layout
from hostcallback.receiver.taplog.format.layout import ChunkHeader, Damage, Kind
from hostcallback.receiver.taplog.reading.segment_reader import SegmentReader
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses
from python_process import python_output, run_python

BAD = StreamKey("run", 0, "a" * 16)
GOOD = StreamKey("run", 1, "b" * 16)


def store_with(folder: Path, *keys: StreamKey, number: int = 1) -> Store:
    store = Store(folder)
    for key in keys:
        store.folder(key.run).mkdir(exist_ok=True)
        writer = SegmentWriter(store.folder(key.run) / key.segment_name(number), info={"process": key.epoch})
        writer.frames("cpu:0", losses(0, 10), DESCRIBED)
        writer.frames("cpu:0", losses(10, 10), DESCRIBED)
        writer.close()
    return store


def delivered(store: Store, **options: Any) -> tuple[list[tuple[str, int]], Delivery]:
    seen: list[tuple[str, int]] = []

    def sink(message: Message) -> None:
        seen.append((str(message.device), message.seq))

    delivery = Delivery(store, sinks=[sink], prints=False, **options)
    assert delivery.wait_idle(60)
    delivery.close()
    store.close()
    return seen, delivery


@pytest.mark.parametrize("error", [MemoryError("too large"), RuntimeError("broken"), RecursionError("deep")])
def test_a_chunk_that_cannot_be_read_is_set_aside_once(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hostcallback.receiver.remote.spool import stream_reader

    read = stream_reader.read_frames

    def failing(file: Any, chunk: Any) -> Any:
        if BAD.epoch in file.path.name and chunk.first_seq == 0:
            raise error
        return read(file, chunk)

    monkeypatch.setattr(stream_reader, "read_frames", failing)
    seen, delivery = delivered(store_with(tmp_path, BAD, GOOD))
    assert sum("p1" in device for device, _ in seen) == 20
    assert [seq for device, seq in seen if "p0" in device] == [*range(10, 20)]
    assert delivery.set_aside == {str(BAD): 1}
    assert "set aside" in caplog.text
    monkeypatch.undo()
    assert delivered(Store(tmp_path))[0] == []  # skipped at the restart, too


def test_a_failing_dispatcher_sets_messages_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = module.LogDelivery.deliver

    def failing(self: Any, run: Any, parts: Any = None) -> None:
        if int(run.block.seqs[0]) == 0:
            raise MemoryError
        deliver(self, run, parts)

    monkeypatch.setattr(module.LogDelivery, "deliver", failing)
    seen, delivery = delivered(store_with(tmp_path, BAD))
    assert [seq for _, seq in seen] == [*range(10, 20)]
    assert delivery.set_aside == {str(BAD): 10}


@pytest.mark.parametrize(("deaths", "harmless", "expected"), [(0, True, 20), (0, False, 10), (1, True, 10)])
def test_a_chunk_in_which_a_collector_died(
    deaths: int, harmless: bool, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(tmp_path, BAD)
    first = StreamOffset(1, 0)
    for _ in range(deaths + 1):
        InProgress(tmp_path).enter(BAD, first)  # and no `leave`: it died
    position = StreamOffset(1, 0)
    findings = cursor.Findings.HARMLESS if harmless else cursor.Findings.POISON
    monkeypatch.setattr(cursor, "examine", lambda *arguments: findings)
    found = InProgress(tmp_path).interrupted
    assert found is not None
    assert found.deaths == deaths + 1
    for _ in range(deaths + 1):
        InProgress(tmp_path).enter(BAD, position)
    monkeypatch.setattr(Delivery, "_wants", lambda self, described: True)
    seen, _ = delivered(store)
    assert len(seen) == expected
    assert InProgress(tmp_path).interrupted is None


def test_a_collector_that_dies_between_chunks_suspects_none(tmp_path: Path) -> None:
    progress = InProgress(tmp_path)
    for offset in 0, 64:
        progress.enter(BAD, StreamOffset(1, offset))
    progress.leave()
    assert InProgress(tmp_path).interrupted is None


def test_the_probe_reads_a_good_chunk(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    folder = store.folder(GOOD.run)
    store.close()
    assert cursor.examine(folder / GOOD.segment_name(1), GOOD, StreamOffset(1, 0)) is cursor.Findings.HARMLESS


LIMITS_OF_THE_PROBE = """
import resource, sys
from pathlib import Path
from hostcallback.receiver.remote.delivery import cursor
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset

cursor.main("open", Path(sys.argv[1]), StreamKey.of_folder(sys.argv[2]), StreamOffset(1, 0))
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS):
    print(*resource.getrlimit(limit), file=sys.__stdout__)
"""


def test_the_probe_takes_a_minute_of_a_processor_and_4_gib_at_most(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    path = store.folder(GOOD.run) / GOOD.segment_name(1)
    store.close()
    found = python_output("-c", LIMITS_OF_THE_PROBE, path, GOOD.folder, PYTHONPATH=python_path())
    assert found.splitlines() == ["60 60", f"{4 << 30} {4 << 30}"]


def test_a_jump_over_a_million_segments_takes_no_time(tmp_path: Path) -> None:
    store = store_with(tmp_path, BAD)
    writer = SegmentWriter(store.folder(BAD.run) / BAD.segment_name(999_999), info={"process": BAD.epoch})
    writer.frames("cpu:0", losses(20, 5), DESCRIBED)
    writer.close()
    began = time.process_time()
    seen, _ = delivered(store)
    assert len(seen) == 25
    assert time.process_time() - began < 2
    assert next_segment(lambda number: tmp_path / "run" / BAD.segment_name(number), 1, 999_999) == 999_999


def test_a_killed_collector_delivers_harmless_messages_again(tmp_path: Path) -> None:
    store_with(tmp_path, BAD, GOOD).close()
    program = textwrap.dedent(
        """
        import os, signal, sys
        from hostcallback.receiver.remote.collector.store import Store
        from hostcallback.receiver.remote.delivery.delivery import Delivery
        delivery = Delivery(Store(sys.argv[1]), sinks=[lambda message: os.kill(os.getpid(), signal.SIGKILL)])
        delivery.wait_idle(60)
        """
    )
    done = run_python("-c", program, tmp_path, timeout_sec=60, PYTHONPATH=python_path())
    assert done.returncode == -signal.SIGKILL, done.stderr
    seen, delivery = delivered(Store(tmp_path))
    assert len(seen) == 40
    assert not delivery.set_aside


@pytest.mark.parametrize(("slow_sec", "most"), [(0.0, 1500), (0.1, 3)], ids=["fast", "slow"])
def test_a_stream_with_a_huge_chunk_gets_turns_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_sec: float, most: int
) -> None:
    """With a consumer that takes longer than a turn for each message, a turn is one message."""
    store = Store(tmp_path)
    for key, count in ((BAD, 3000), (GOOD, 10)):
        store.folder(key.run).mkdir(exist_ok=True)
        writer = SegmentWriter(store.folder(key.run) / key.segment_name(1), info={"process": key.epoch})
        writer.frames("cpu:0", losses(0, count), DESCRIBED)
        writer.close()
    monkeypatch.setattr(process_groups, "TURN_SEC", 0.0)
    if not slow_sec:  # a turn lasts as long as reading took: other processes of the machine must not count
        monkeypatch.setattr(process_groups, "time", SimpleNamespace(monotonic=time.thread_time))
    seen: list[tuple[str, int]] = []
    pause = threading.Event()

    def see(message: Message) -> None:
        seen.append((str(message.device), message.seq))
        if len(seen) <= 5:
            pause.wait(slow_sec)

    delivery = Delivery(store, sinks=[see])
    assert delivery.wait_idle(60)
    delivery.close()
    store.close()
    slow = [seq for device, seq in seen if "p0" in device]
    assert slow == [*range(3000)]
    before = next(place for place, (device, _) in enumerate(seen) if "p1" in device)
    assert before <= most, "the other stream must not wait for the whole chunk"


def test_a_turn_that_ends_in_a_chunk_is_continued_by_the_next_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(tmp_path, BAD)
    monkeypatch.setattr(process_groups, "TURN_SEC", 0.0)
    monkeypatch.setattr(process_groups, "PART_MESSAGES", 8)
    seen: list[int] = []
    ended = threading.Event()

    def sink(message: Message) -> None:
        seen.append(message.seq)
        if message.seq == 12:
            ended.set()
            assert go_on.wait(60)

    go_on = threading.Event()
    delivery = Delivery(store, sinks=[sink], prints=False)
    assert ended.wait(60)
    delivery.close(0.0)
    go_on.set()
    delivery._thread.join(60)
    store.close()
    assert seen[-1] < 19, "it ended within the second chunk"
    rest, _ = delivered(Store(tmp_path))
    assert seen + [seq for _, seq in rest] == [*range(20)]


KILLED_BY_MEMORY = """
import os, signal, sys, threading
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery.delivery import Delivery

def watch():
    while True:
        with open("/proc/self/statm") as file:
            if int(file.read().split()[1]) > 40_000:
                os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=watch, daemon=True).start()
seen = []
delivery = Delivery(Store(sys.argv[1]), sinks=[lambda message: seen.append(message.seq)], prints=False)
assert delivery.wait_idle(60)
delivery.close()
print(len(seen), sum(delivery.set_aside.values()))
"""


@pytest.mark.slow
def test_a_chunk_that_takes_all_memory_stops_a_collector_once(tmp_path: Path) -> None:
    store_with(tmp_path, BAD, GOOD).close()
    path = tmp_path / BAD.run / BAD.segment_name(1)
    _, *chunks = SegmentReader(path).headers()
    second = [chunk for chunk in chunks if not isinstance(chunk, Damage) and chunk.kind is Kind.FRAMES][1]
    header = ChunkHeader(*second[:-1])._replace(stored_bytes=1 << 32, raw_bytes=1 << 32)
    with path.open("r+b") as file:
        file.seek(second.offset)
        file.write(layout.encode_chunk_header(header))
        file.truncate(second.offset + layout.chunk_bytes(1 << 32))  # a sparse file
    environment = {"PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    killed, after = (run_python("-c", KILLED_BY_MEMORY, tmp_path, **environment) for _ in range(2))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert after.returncode == 0, after.stderr
    assert "is set aside" in after.stderr
    delivered_after, set_aside = map(int, after.stdout.split())
    assert set_aside == 10
    assert delivered_after >= 20  # those of the good stream; of the other one, if they had not been delivered


def test_forgotten_streams_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [StreamKey("run", process, "c" * 16) for process in range(6)]
    store = store_with(tmp_path, *keys)
    monkeypatch.setattr(limits, "STREAMS_KEPT", 2)
    monkeypatch.setattr(limits, "DESCRIPTIONS_KEPT", 3)
    monkeypatch.setattr(module, "SAVE_SEC", 0.0)
    seen: list[tuple[str, int]] = []
    delivery = Delivery(store, sinks=[lambda message: seen.append((str(message.device), message.seq))])
    for number in (2, 3):
        assert delivery.wait_idle(60)
        for key in keys:
            writer = SegmentWriter(
                store.folder(key.run) / key.segment_name(number), info={"process": key.epoch}
            )
            writer.frames("cpu:0", losses(10 * number, 10), DESCRIBED)
            writer.close()
            delivery.grown(
                key, StreamOffset(number, (store.folder(key.run) / key.segment_name(number)).stat().st_size)
            )
    assert delivery.wait_idle(60)
    delivery.close()
    store.close()
    assert len(delivery._streams) <= 2
    for process in range(6):
        assert [seq for device, seq in seen if f"p{process} " in device] == [*range(40)]


def test_what_was_delivered_is_saved_while_other_streams_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that dies then does not deliver it again."""
    store = store_with(tmp_path, BAD, GOOD)
    monkeypatch.setattr(module, "SAVE_SEC", 0.0)
    saved: dict[str, StreamOffset] = {}  # when the first message of a stream is delivered

    def sink(message: Message) -> None:
        known = cursor.Cursor(tmp_path)
        saved.setdefault(str(message.device), max(known.position(BAD), known.position(GOOD)))

    Delivery(store, sinks=[sink], prints=False).close()
    store.close()
    before, between = saved.values()
    assert before == StreamOffset(0, 0) < between


def test_segments_of_another_process_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(tmp_path, BAD)
    for number, process in ((2, "another"), (3, BAD.epoch)):
        writer = SegmentWriter(store.folder(BAD.run) / BAD.segment_name(number), info={"process": process})
        writer.frames("cpu:0", losses(10 * number, 10), DESCRIBED)
        writer.close()
    seen, _ = delivered(store)
    assert [seq for _, seq in seen] == [*range(20), *range(30, 40)]
    assert "another process" in caplog.text


def test_counters_of_foreign_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COUNTED_NAMES", 3)
    counter = BoundedCounter()
    for number in range(10):
        counter[f"name {number}"] += 2
    counter["name 0"] += 1
    assert counter == {"name 0": 3, "name 1": 2, "name 2": 2, OTHERS: 14}
