"""A stream that is opened again is not validated again, unless its files have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostcallback.receiver.remote.collector import store as stored_stream
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.taplog.writing.segment_writer import SegmentWriter
from logged_frames import DESCRIBED, losses

KEY = StreamKey("run", 0, "a" * 16)


@pytest.fixture
def segment(tmp_path: Path) -> bytes:
    info = {"run": KEY.run, "stream_process": 0, "process": KEY.epoch, "segment": 1, "process_index": 0}
    writer = SegmentWriter(tmp_path / "a.hcblog", info=info)
    writer.frames("cpu:0", losses(0, 10), DESCRIBED)
    writer.close()
    return (tmp_path / "a.hcblog").read_bytes()


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
