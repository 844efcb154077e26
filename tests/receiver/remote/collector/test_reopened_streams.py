"""A stream that is opened again is not validated again, unless its files have changed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from hostcallback.receiver import limits
from hostcallback.receiver.errors import BadStreamError, GapError, RemoteError
from hostcallback.receiver.remote.collector import store as stored_stream
from hostcallback.receiver.remote.collector.segment_validator import SegmentValidator
from hostcallback.receiver.remote.collector.service import Collector
from hostcallback.receiver.remote.collector.store import AckBatcher, Store, StoredStream
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from threads import run_coroutine

KEY = StreamKey("run", 0, "a" * 16)


def test_files_that_no_collector_wrote_do_not_keep_it_from_starting(segment: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "stored" / KEY.run
    folder.mkdir(parents=True)
    (folder / KEY.segment_name(1)).write_bytes(segment)
    (folder / f"p9999999999-{KEY.epoch}-000001.hcblog").write_bytes(segment)
    (folder / f"p000001-{KEY.epoch}-000001.hcblog").mkdir()
    os.mkfifo(folder / f"p000002-{KEY.epoch}-000001.hcblog")
    (folder / f"p000003-{KEY.epoch}-000001.hcblog").symlink_to("nowhere")
    store = Store(tmp_path / "stored")
    assert store.stored() == {KEY: StreamOffset(1, len(segment))}
    store.close()


def test_reopening_validates_only_changed_files(
    segment: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[str] = []
    check = stored_stream.check_file
    monkeypatch.setattr(
        stored_stream, "check_file", lambda path, *of: validated.append(path.name) or check(path, *of)
    )
    store = Store(tmp_path / "stored")
    half = len(segment) // 2
    store.open(KEY).append(StreamOffset(1, 0), segment[:half])
    for _ in range(3):
        store.forget(KEY)
        assert store.open(KEY).stored == StreamOffset(1, half)
    assert not validated
    store.open(KEY).append(StreamOffset(1, half), segment[half:])
    path = store.open(KEY).path(1)
    store.forget(KEY)
    assert path.read_bytes() == segment
    path.write_bytes(segment[:half])  # as after a crash of the machine
    assert store.open(KEY).stored == StreamOffset(1, half)
    assert validated == [path.name]
    store.forget(KEY)
    path.unlink()
    assert store.open(KEY).stored == StreamOffset(0, 0)
    store.close()


def test_a_damaged_file_is_removed_with_a_warning_and_stored_again(
    segment: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "stored")
    store.folder(KEY.run).mkdir()
    path = store.folder(KEY.run) / KEY.segment_name(1)
    path.write_bytes(bytes(len(segment)))  # as after a crash of the machine
    stream = store.open(KEY)
    assert stream.stored == StreamOffset(1, 0)
    (told,) = caplog.messages
    assert told.startswith(f"{path} is damaged (")
    assert told.endswith(") and was removed; the stream continues at its beginning")
    stream.append(StreamOffset(1, 0), segment)
    assert path.read_bytes() == segment
    store.close()


def test_slices_that_are_stored_already_change_nothing(segment: bytes, tmp_path: Path) -> None:
    store = Store(tmp_path / "stored")
    stream, half = store.open(KEY), len(segment) // 2
    assert stream.append(StreamOffset(1, 0), segment[:half])
    assert not stream.append(StreamOffset(1, 0), segment[:half])
    assert not stream.append(StreamOffset(0, 0), segment)
    assert not stream.append(StreamOffset(1, 10), segment[10:half])
    for position, said in (
        (StreamOffset(1, half + 1), f"{KEY} continues at (1, {half + 1}), and is stored up to (1, {half})"),
        (StreamOffset(2, 1), f"segment 2 of {KEY} does not start at its beginning"),
    ):
        with pytest.raises(GapError) as caught:
            stream.append(position, segment)
        assert str(caught.value) == said
    assert stream.append(StreamOffset(1, half - 1), segment[half - 1 :])
    assert stream.stored == StreamOffset(1, len(segment))
    assert [path.read_bytes() for path in store.folder(KEY.run).iterdir()] == [segment]
    store.close()


def test_a_slice_that_cannot_be_written_is_not_stored_in_part(
    segment: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "stored", fsync=True)
    stream, half = store.open(KEY), len(segment) // 2
    stream.append(StreamOffset(1, 0), segment[:half])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            stream.append(StreamOffset(1, half), segment[half:])
    assert stream.stored == StreamOffset(1, half)
    assert stream.path(1).read_bytes() == segment[:half]
    assert stream.append(StreamOffset(1, half), segment[half:])
    assert stream.path(1).read_bytes() == segment
    store.close()


def test_a_stream_is_not_continued_before_a_segment_that_came_meanwhile(
    segment: bytes, tmp_path: Path
) -> None:
    store = Store(tmp_path / "stored")
    store.open(KEY).append(StreamOffset(1, 0), segment)
    later = store.open(KEY).path(2)
    store.forget(KEY)
    later.write_bytes(b"")  # as of another collector
    assert store.open(KEY).stored == StreamOffset(2, 0)
    store.close()


def test_a_folder_belongs_to_one_collector(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RemoteError, match=f"^{tmp_path}: another collector stores there; end it first"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_the_number_of_streams_is_limited(
    segment: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAMS", 2)
    store = Store(tmp_path)
    others = [StreamKey("run", process, "b" * 16) for process in (1, 2)]
    store.open(KEY).append(StreamOffset(1, 0), segment)
    store.open(others[0])
    with pytest.raises(BadStreamError, match="the collector stores 2 streams already: move old runs out of"):
        store.open(others[1])
    store.forget(KEY)
    assert store.open(KEY).stored == StreamOffset(1, len(segment))
    store.close()
    again = Store(tmp_path)  # the stream without files does not count any more
    again.open(others[1])
    with pytest.raises(BadStreamError, match="the collector stores 2 streams already"):
        again.open(others[0])
    again.close()


def test_the_last_streams_that_ended_are_not_validated_again(
    segment: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAMS_KEPT", 1)
    validated: list[Path] = []
    monkeypatch.setattr(
        stored_stream, "check_file", lambda path, *of: validated.append(path) or SegmentValidator(*of)
    )
    store = Store(tmp_path / "stored")
    other = StreamKey("run", 1, "b" * 16)
    for key in (KEY, other):
        store.folder(key.run).mkdir(exist_ok=True)
        store.open(key)._begin(1)
        store.forget(key)
    store.open(other)
    assert validated == []
    assert store.open(KEY).path(1) in validated
    store.close()


def test_many_bytes_are_acknowledged_at_once(
    segment: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_stream, "ACK_SEC", 1e9)
    monkeypatch.setattr(stored_stream, "ACK_BYTES", 100)

    async def acknowledged() -> list[int]:
        found: list[int] = []
        wrote = asyncio.Event()

        async def write(data: bytes) -> None:
            found.append(stored)
            wrote.set()

        async with AckBatcher(store.open(KEY), write) as batcher:
            for stored in (50, 99, 100, 150, 199, 250):
                batcher.stored(stored - before[0])
                before[0] = stored
                if stored in (100, 250):
                    await asyncio.wait_for(wrote.wait(), 10)
                    wrote.clear()
                else:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        return found

    before = [0]
    store = Store(tmp_path / "stored")
    assert run_coroutine(acknowledged()) == [100, 250, 250]
    store.close()


class SlowStore(Store):
    """Opens streams when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.may_open, self.forgotten = threading.Event(), threading.Event(), list[StreamKey]()

    def open(self, key: StreamKey) -> StoredStream:
        self.begun.set()
        assert self.may_open.wait(20)
        return super().open(key)

    def forget(self, key: StreamKey) -> None:
        super().forget(key)
        self.forgotten.append(key)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_stream_whose_client_is_gone_before_it_is_open_is_closed_unless_the_client_is_back(
    tmp_path: Path, is_back: bool
) -> None:
    store = SlowStore(tmp_path / "stored")
    collector = Collector(store)

    async def open_and_go() -> None:
        opening = asyncio.ensure_future(collector._open(KEY))
        await asyncio.to_thread(store.begun.wait, 20)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not store.forgotten
        if is_back:
            collector.streams[KEY] = asyncio.get_running_loop().create_future()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        store.may_open.set()
        await asyncio.gather(*others)
        await asyncio.sleep(0)  # what is called at its end

    run_coroutine(open_and_go())
    assert store.forgotten == ([] if is_back else [KEY])
    store.close()
