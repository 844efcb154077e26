"""A message that fails in delivery is set aside, and other streams go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from checkout import python_path
from hostcallback.receiver.messages.message import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery import delivery as module
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.delivery.in_progress import InProgress
from hostcallback.receiver.remote.spool.stream_reader import next_segment
from hostcallback.receiver.remote.streams import StreamKey, StreamOffset
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses

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
    deliver = module.RunDelivery.deliver

    def failing(self: Any, run: Any, parts: Any = None) -> None:
        if int(run.block.seqs[0]) == 0:
            raise MemoryError
        deliver(self, run, parts)

    monkeypatch.setattr(module.RunDelivery, "deliver", failing)
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
    monkeypatch.setattr(module, "is_harmless", lambda *arguments: harmless)
    found = InProgress(tmp_path).interrupted
    assert found is not None
    assert found.deaths == deaths + 1
    for _ in range(deaths + 1):
        InProgress(tmp_path).enter(BAD, position)
    monkeypatch.setattr(Delivery, "_wants", lambda self, described: True)
    seen, _ = delivered(store)
    assert len(seen) == expected
    assert InProgress(tmp_path).interrupted is None


def test_the_probe_reads_a_good_chunk(tmp_path: Path) -> None:
    store = store_with(tmp_path, GOOD)
    folder = store.folder(GOOD.run)
    store.close()
    assert module.is_harmless(folder, GOOD, StreamOffset(1, 0))


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
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    seen, delivery = delivered(Store(tmp_path))
    assert len(seen) == 40
    assert not delivery.set_aside
