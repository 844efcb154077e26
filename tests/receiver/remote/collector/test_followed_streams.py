"""Following streams of a collector, in one process: what is sent, what is stored, and how it ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collecting import responses, wait_for
from hostcallback.receiver.errors import StreamRefusedError, TransportError
from hostcallback.receiver.remote.collector import follow_server
from hostcallback.receiver.remote.collector.access import Access
from hostcallback.receiver.remote.collector.follow_server import Following, GrowthWatcher
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.follow_client import RemoteLog
from hostcallback.receiver.remote.forwarding_protocol import (
    FORWARD,
    SERVICE,
    SegmentSlice,
    StreamKey,
    StreamOffset,
    encode_hello,
    encode_place,
)
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses
from served import Served, served
from threads import run_coroutine

KEY, OTHER = StreamKey("run", 0, "a" * 16), StreamKey("run", 1, "b" * 16)
Pieces = list[tuple[StreamKey, SegmentSlice] | None]


class Growth(GrowthWatcher):
    """Tells when the client waits for more."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = asyncio.Event()

    async def wait(self) -> None:
        self.waits.set()
        await super().wait()


class Streams:
    """Stored files of any content, and a client that follows them."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.growth = Growth()
        self.on_piece: Callable[[Any], None] = lambda piece: None

    def write(self, key: StreamKey, number: int, data: bytes) -> Path:
        path = self.store.folder(key.run) / key.segment_name(number)
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        return path

    def grow(self, key: StreamKey, number: int, data: bytes) -> None:
        self.growth.grown(key, StreamOffset(number, self.write(key, number, data).stat().st_size))

    def followed(
        self, *later: Callable[[], Any], wants: Callable[[str], bool] = lambda run: True
    ) -> list[Pieces]:
        """What the client gets at first, and after each of these was called while it waited for more."""

        async def follow() -> list[Pieces]:
            found: list[Pieces] = [[]]

            async def take() -> None:
                async for piece in Following(self.store, self.growth, wants).pieces():
                    found[-1].append(piece)
                    self.on_piece(piece)

            taking = asyncio.ensure_future(take())
            for change in later:
                await asyncio.wait_for(self.growth.waits.wait(), 10)
                self.growth.waits.clear()
                found.append([])
                change()
            await asyncio.wait_for(self.growth.waits.wait(), 10)
            self.growth.end()
            await asyncio.wait_for(taking, 10)
            return found

        return run_coroutine(follow())


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[Streams]:
    made = Streams(tmp_path / "log")
    yield made
    made.store.close()


def piece(key: StreamKey, number: int, offset: int, data: bytes) -> tuple[StreamKey, SegmentSlice]:
    return key, SegmentSlice(StreamOffset(number, offset), data)


def test_a_follower_gets_the_last_segments_and_then_what_comes_later(streams: Streams) -> None:
    streams.write(KEY, 1, b"earlier")
    os.utime(streams.write(KEY, 2, b"last"), (1000, 1000))
    streams.write(OTHER, 7, b"seventh")

    def grow() -> None:
        streams.grow(KEY, 2, b" bytes")
        streams.grow(KEY, 5, b"after a gap")

    first, *later = streams.followed(grow, lambda: streams.grow(StreamKey("new", 0, "c" * 16), 1, b"begins"))
    assert first == [piece(KEY, 2, 0, b"last"), piece(OTHER, 7, 0, b"seventh"), None]
    assert later == [
        [piece(KEY, 2, 4, b" bytes"), piece(KEY, 5, 0, b"after a gap")],
        [piece(StreamKey("new", 0, "c" * 16), 1, 0, b"begins")],
    ]


def test_a_follower_gets_what_is_stored_just_before_the_end(streams: Streams) -> None:
    streams.write(KEY, 1, b"first")

    def grow_and_end(got: Any) -> None:
        if got == piece(OTHER, 1, 0, b"other"):
            streams.grow(KEY, 1, b" last")
            streams.growth.end()
            streams.growth.waits.set()

    streams.on_piece = grow_and_end
    found = streams.followed(lambda: streams.grow(OTHER, 1, b"other"))
    assert found[1] == [piece(OTHER, 1, 0, b"other"), piece(KEY, 1, 5, b" last")]


def test_a_stream_that_began_while_the_follower_was_busy_comes_from_its_first_segment(
    streams: Streams,
) -> None:
    streams.write(KEY, 1, b"earlier")
    streams.write(KEY, 2, b"last")

    def begin(got: Any) -> None:
        if got == piece(KEY, 2, 0, b"last"):
            streams.grow(OTHER, 1, b"first")
            streams.grow(OTHER, 2, b"second")

    streams.on_piece = begin
    found = streams.followed()
    assert found[0] == [
        piece(KEY, 2, 0, b"last"),
        None,
        piece(OTHER, 1, 0, b"first"),
        piece(OTHER, 2, 0, b"second"),
    ]


def test_a_follower_gets_no_other_runs(streams: Streams) -> None:
    mine, theirs = StreamKey("mine", 0, "a" * 16), StreamKey("theirs", 0, "b" * 16)
    streams.write(mine, 1, b"mine")
    streams.write(theirs, 1, b"theirs")

    def grow() -> None:
        streams.grow(theirs, 1, b"!")
        streams.grow(mine, 1, b"!")

    found = streams.followed(grow, wants=lambda run: run == "mine")
    assert found == [[piece(mine, 1, 0, b"mine"), None], [piece(mine, 1, 4, b"!")]]


def test_of_many_streams_those_that_grew_last_are_sent(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_server, "MAX_OLD", 2)
    keys = [StreamKey("run", process, "a" * 16) for process in range(4)]
    for key, seconds in zip(keys, (3000, 1000, 4000, 2000), strict=True):
        streams.write(key, 1, b"earlier")
        os.utime(streams.write(key, 2, b"last"), (seconds, seconds))
    assert streams.followed() == [[piece(keys[0], 2, 0, b"last"), piece(keys[2], 2, 0, b"last"), None]]


def test_long_segments_come_in_slices(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_server, "PIECE_BYTES", 4)
    streams.write(KEY, 1, b"0123456789")
    assert streams.followed() == [
        [piece(KEY, 1, 0, b"0123"), piece(KEY, 1, 4, b"4567"), piece(KEY, 1, 8, b"89"), None]
    ]


def test_segments_that_were_removed_are_left_out(streams: Streams) -> None:
    path = streams.write(KEY, 1, b"first")

    def grow_and_remove() -> None:
        streams.write(KEY, 1, b" never read")
        streams.write(KEY, 2, b"second").unlink()
        path.unlink()
        streams.grow(KEY, 4, b"fourth")

    assert streams.followed(grow_and_remove) == [
        [piece(KEY, 1, 0, b"first"), None], [piece(KEY, 4, 0, b"fourth")]
    ]  # fmt: skip


def test_a_follower_of_a_segment_that_was_removed_waits_for_more(streams: Streams) -> None:
    path = streams.write(KEY, 1, b"first")

    def grow_and_remove() -> None:
        path.unlink()
        streams.growth.grown(KEY, StreamOffset(1, 9))

    assert streams.followed(grow_and_remove, lambda: streams.grow(KEY, 2, b"second")) == [
        [piece(KEY, 1, 0, b"first"), None], [], [piece(KEY, 2, 0, b"second")]
    ]  # fmt: skip


def segment(folder: Path, key: StreamKey, number: int) -> bytes:
    info = {
        "run": key.run, "stream_process": key.process, "process": key.epoch, "segment": number,
        "process_index": key.process,
    }  # fmt: skip
    path = folder / f"{key.run}-{key.process}-{number}.hcblog"
    writer = SegmentWriter(path, info=info)
    writer.frames("cpu:0", losses(10 * number, 10), DESCRIBED)
    writer.close()
    return path.read_bytes()


def send(collector: Served, key: StreamKey, number: int, data: bytes) -> None:
    """Has the collector store a segment, or the beginning of one."""
    first = encode_hello(key), encode_place(StreamOffset(number, 0))
    _, error = responses(collector.address, f"/{SERVICE}/{FORWARD}", *first, data)
    assert error is None


def test_a_followed_log_has_the_files_of_the_collector(tmp_path: Path) -> None:
    with served(tmp_path / "log") as collector:
        data = segment(tmp_path, KEY, 1)
        send(collector, KEY, 1, data)
        with RemoteLog(Forward(collector.address), "r?n") as log:
            log.wait(30)
            first, second = (log.folder / KEY.segment_name(number) for number in (1, 2))
            assert first.read_bytes() == data
            stranger = StreamKey("else", 0, "a" * 16)
            send(collector, stranger, 1, segment(tmp_path, stranger, 1))
            alone = log.folder / OTHER.segment_name(1)
            for key, path, number in ((OTHER, alone, 1), (KEY, second, 2)):
                data = segment(tmp_path, key, number)
                send(collector, key, number, data)
                wait_for(lambda path=path, data=data: path.exists() and path.read_bytes() == data, "the file")
            assert sorted(log.folder.iterdir()) == [first, second, alone]
            assert log.finished() == [first]
            log.remove([first])
            assert sorted(log.folder.iterdir()) == [second, alone]
            assert log.finished() == []
            log.check()
            collector.server.end()
            with pytest.raises(TransportError, match=rf"^the collector at {collector.address} has ended$"):
                wait_for(log.check)
        assert not log.folder.exists()


@pytest.mark.parametrize("length", [3, 1000])
def test_a_log_whose_file_does_not_fit_what_is_sent_cannot_be_followed(tmp_path: Path, length: int) -> None:
    data = segment(tmp_path, KEY, 1)
    with served(tmp_path / "log") as collector:
        send(collector, KEY, 1, data[:500])
        with RemoteLog(Forward(collector.address), "*") as log:
            log.wait(30)
            os.truncate(log.folder / KEY.segment_name(1), length)
            send(collector, KEY, 1, data)
            with pytest.raises(TransportError) as caught:
                wait_for(log.check)
    assert str(caught.value) == (
        f"what the collector at {collector.address} sends cannot be followed: "
        f"run p0 ({KEY.epoch}) continues at (1, 500), and {length} bytes of it are stored"
    )


def test_a_token_decides_which_runs_are_followed(tmp_path: Path) -> None:
    access = Access({"writer": ("*",), "reader": ("mine*",)})
    log_folder = tmp_path / "log"
    for run in ("mine-1", "other"):
        (log_folder / run).mkdir(parents=True)
        key = StreamKey(run, 0, "a" * 16)
        (log_folder / run / key.segment_name(1)).write_bytes(run.encode())
    with served(log_folder, access=access) as collector:
        with RemoteLog(Forward(collector.address, token="reader"), "*") as log:
            log.wait(30)
            assert [path.read_text() for path in log.folder.iterdir()] == ["mine-1"]
        with (
            RemoteLog(Forward(collector.address, token="stranger"), "*") as log,
            pytest.raises(StreamRefusedError, match=r"does not know this token .*UNAUTHENTICATED"),
        ):
            log.wait(30)


def test_a_program_that_does_not_answer_is_not_waited_for_any_longer() -> None:
    with socket.create_server(("localhost", 0)) as listening:
        address = f"localhost:{listening.getsockname()[1]}"
        with (
            RemoteLog(Forward(address), "*") as log,
            pytest.raises(TransportError, match=rf"^the collector at {address} did not answer in 0\.02 s$"),
        ):
            log.wait(0.02)
