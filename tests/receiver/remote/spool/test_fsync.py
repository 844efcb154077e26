"""With `fsync=True` a write is over when it is on the disk: in the spool, and in the collector's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collecting import Emitter, forwarder
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset


@pytest.mark.parametrize("fsync", [True, False])
def test_written_data_is_on_the_disk(fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}  # by inode: how long the file was
    real = os.fsync

    def noting(fd: int) -> None:
        real(fd)
        found = os.fstat(fd)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", noting)

    def is_on_disk(path: Path) -> bool:
        found = path.stat()
        return synced.get(found.st_ino) == found.st_size > 0

    with forwarder("localhost:1", tmp_path / "spool", fsync=fsync, drain_sec=0.1) as recorder:
        for _ in range(3):
            Emitter(recorder).losses(10)
            recorder.flush()
            (segment,) = (tmp_path / "spool").glob("*/*.hcblog")
            assert is_on_disk(segment) == fsync
        data = segment.read_bytes()
        key = StreamKey.of_folder(segment.parent.name)
    assert key is not None
    stream = Store(tmp_path / "collected", fsync=fsync).open(key)
    assert stream.append(StreamOffset(1, 0), data)
    assert is_on_disk(stream.path(1)) == fsync
