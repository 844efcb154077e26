"""Streams that do not grow any more: a collector that goes on for months has not all of their files open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collecting import Emitter, forwarder, wait_for
from hostcallback.receiver.messages import Message
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.delivery import process_groups as delivered_stream
from hostcallback.receiver.remote.delivery.delivery import Delivery
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset


def is_open(path: Path) -> bool:
    """Whether this process has the file open, or mapped."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                return True
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for open files in /proc")
def test_its_file_is_closed_and_opened_again_when_more_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivered_stream, "IDLE_SEC", 0.05)
    recorder = forwarder("localhost:1", tmp_path / "spool", drain_sec=0.0)
    emitter, found = Emitter(recorder), list[int]()
    (folder,) = (tmp_path / "spool").iterdir()
    key = StreamKey.of_folder(folder.name)
    assert key is not None

    def take(message: Message) -> None:
        found.append(message.seq)

    store = Store(tmp_path / "log")
    behind = Delivery(store, sinks=[take], prints=False)
    path = store.folder("run") / key.segment_name(1)
    for turn in range(1, 4):
        emitter.losses(50)
        recorder.flush()
        data = (folder / "000001.hcblog").read_bytes()
        stream = store.open(key)
        stream.append(StreamOffset(1, stream.stored.offset), data[stream.stored.offset :])
        behind.grown(key, stream.stored)
        store.forget(key)
        wait_for(lambda count=50 * turn: len(found) == count, "the messages")
        wait_for(lambda: not is_open(path), "a closed file")
    assert found == list(range(150))
    behind.close()
    store.close()
    recorder.close()
