"""A server that acknowledges unsent messages must not make a client delete its spool."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hostcallback.receiver.remote.forwarding_protocol import (
    MAX_SEGMENT,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.sender import Sender
from hostcallback.receiver.remote.spool.spool import Spool


class Server:
    """Claims positions when a stream begins, and for each slice."""

    def __init__(self, stored: StreamOffset, ack: StreamOffset | None) -> None:
        self._claimed = stored
        self._ack = ack
        self.sent = threading.Event()

    def connect(self, key: StreamKey, on_ack: object) -> Server:
        self.stored = self._claimed
        self._on_ack = on_ack
        return self

    def send(self, piece: SegmentSlice) -> None:
        self._on_ack(piece.end if self._ack is None else self._ack)  # type: ignore[operator]
        self.sent.set()

    def check(self) -> None:
        """The connection is good."""

    def close(self) -> None:
        """Nothing is open."""


FAR = StreamOffset(MAX_SEGMENT, 2**40)


@pytest.mark.parametrize(
    ("stored", "ack"),
    [(FAR, None), (StreamOffset(2, 0), None), (StreamOffset(0, 0), FAR)],
    ids=["all", "next", "ack"],
)
def test_unsent_messages_are_kept(
    stored: StreamOffset, ack: StreamOffset | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r"))
    ended = threading.Event()
    sender = Sender(spool, Server(stored, ack), window_bytes=1 << 20, on_end=ended.set)
    assert spool.waiting_bytes > 0
    assert ended.wait(20)
    assert "was sent" in sender.refused
    assert "nothing is deleted" in caplog.text
    spool.log.close()
    assert list(spool.folder.path.glob("*.hcblog"))
    sender.stop()


def test_sent_messages_are_acknowledged(tmp_path: Path) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r"))
    server = Server(StreamOffset(0, 0), None)
    sender = Sender(spool, server, window_bytes=1 << 20)
    assert server.sent.wait(20)
    assert sender.drain(20)
    assert not sender.refused
    sender.stop()
    spool.log.close()


def test_what_waits_is_what_is_not_acknowledged(tmp_path: Path) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r"))
    written = spool.waiting_bytes
    assert written == sum(path.stat().st_size for path in spool.folder.path.glob("*.hcblog")) > 100
    spool.acked(StreamOffset(1, 100))
    assert spool.waiting_bytes == written - 100
    spool.acked(StreamOffset(1, 60))  # late
    assert spool.waiting_bytes == written - 100
    assert not spool.is_sent()
    spool.acked(StreamOffset(1, written))
    assert spool.waiting_bytes == 0
    assert spool.is_sent()
    spool.log.close()
