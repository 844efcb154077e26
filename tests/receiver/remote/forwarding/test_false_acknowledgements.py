"""A server that acknowledges unsent messages must not make a client delete its spool."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from collecting import wait_for
from hostcallback.receiver.errors import TransportError
from hostcallback.receiver.remote.forwarding_protocol import (
    MAX_SEGMENT,
    SegmentSlice,
    StreamKey,
    StreamOffset,
)
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending import sender as sender_module
from hostcallback.receiver.remote.sending.sender import Sender
from hostcallback.receiver.remote.spool.spool import Spool
from hostcallback.receiver.remote.spool.spool_folders import OrphanSpool, StreamFolder


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
    sender = Sender(spool, Server(stored, ack), window_bytes=1 << 20)
    assert spool.waiting_bytes > 0
    wait_for(lambda: sender.refused, "the refusal")
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


class LateServer(Server):
    """Acknowledges what was sent when it is told to."""

    checks = 0

    def send(self, piece: SegmentSlice) -> None:
        self.end = piece.end
        self.sent.set()

    def check(self) -> None:
        self.checks += 1

    def acknowledge(self) -> None:
        self._on_ack(self.end)  # type: ignore[operator]


def test_what_a_dead_process_left_is_sent_and_its_acknowledgement_awaited_without_work(
    tmp_path: Path,
) -> None:
    folder = StreamFolder.make(tmp_path, StreamKey("run", 0, "0123456789abcdef"))
    folder.segment(1).write_bytes(b"left")
    server = LateServer(StreamOffset(0, 0), None)
    sender = Sender(OrphanSpool(folder), server, window_bytes=1 << 20, ends=True)
    assert server.sent.wait(20)
    assert not sender.drain(0.1)
    assert server.checks < 20
    server.acknowledge()
    assert sender.drain(20)
    assert not sender.refused
    sender.stop()


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


class FullServer(Server):
    """Takes each connection, and refuses the first slices as a collector with a full disk does."""

    refusals = 3

    def send(self, piece: SegmentSlice) -> None:
        self.refusals -= 1
        if self.refusals >= 0:
            raise TransportError("the disk is full")
        super().send(piece)


def test_a_connection_that_stores_nothing_is_not_reported_as_working_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(Forward("localhost:7070", spool=tmp_path, run="r"))
    sender = Sender(spool, FullServer(StreamOffset(0, 0), None), window_bytes=1 << 20)
    assert sender.drain(20)
    wait_for(lambda: "works again" in caplog.text, "the sender's report")
    sender.stop()
    spool.log.close()
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    key = spool.key
    assert len(said) == 2, said
    assert f"{key} cannot be forwarded at present: the disk is full".startswith(said[0])
    assert f"forwarding of {key} works again".startswith(said[1])


class Slices:
    """A stream of slices of one byte."""

    key = StreamKey("r", 0, "0" * 16)

    def __init__(self, count: int) -> None:
        self.sent_before = StreamOffset(1, 0)
        self._end = StreamOffset(1, count)
        self._stored = StreamOffset(0, 0)

    def read(self, position: StreamOffset, timeout_sec: float) -> SegmentSlice | None:
        return None if position >= self._end else SegmentSlice(StreamOffset(1, position.offset), b"x")

    def acked(self, position: StreamOffset) -> None:
        self._stored = position

    def is_sent(self) -> bool:
        return self._stored >= self._end


class BreakingServer(Server):
    """Its connections break: the first ones before a slice is stored, all others with each slice that is stored."""

    def __init__(self, failures: int, breaks: str) -> None:
        super().__init__(StreamOffset(0, 0), None)
        self._failures = failures
        self._breaks = breaks

    def connect(self, key: StreamKey, on_ack: object) -> Server:
        self._failures -= 1
        if self._failures >= 0:
            raise TransportError("it is down")
        return super().connect(key, on_ack)

    def send(self, piece: SegmentSlice) -> None:
        self._claimed = piece.end
        if self._breaks == "before its acknowledgement":
            raise TransportError("it broke")
        if self._breaks == "after its acknowledgement":
            super().send(piece)
            raise TransportError("it broke")
        super().send(piece)


def waits_of_orphan(
    server: Server, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> tuple[list[float], list[str]]:
    """Sends an orphan of `count` slices. Returns the seconds of each wait, and what was logged."""
    waits: list[float] = []
    ended = threading.Event()
    monkeypatch.setattr(sender_module._random, "uniform", lambda low, high: high)
    monkeypatch.setattr(Sender, "_wait", lambda self, seconds: waits.append(seconds))
    sender = Sender(Slices(count), server, window_bytes=1, ends=True, on_end=ended.set)
    assert ended.wait(20)
    sender.stop()
    return waits, ["works again" if "again" in r.getMessage() else "cannot" for r in caplog.records]


def test_an_orphan_that_is_sent_ends_without_another_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits, said = waits_of_orphan(BreakingServer(4, "never"), 1, monkeypatch, caplog)
    assert waits == [0.1, 0.2, 0.4, 0.8]  # one after each attempt that failed
    assert said == ["cannot", "works again"]


@pytest.mark.parametrize(
    ("breaks", "waits"),
    [
        ("before its acknowledgement", [0.1, 0.2, 0.4, 0.1, 0.1, 0.1, 0.1]),  # seen at the next connection
        ("after its acknowledgement", [0.1, 0.2, 0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_connections_that_break_after_they_have_stored_something_count_as_working(
    breaks: str, waits: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, said = waits_of_orphan(BreakingServer(2, breaks), 5, monkeypatch, caplog)
    assert found == waits
    # Before the first acknowledgement the other reason is one more.
    assert said == ["cannot"] * breaks.startswith("before") + 5 * ["cannot", "works again"]


class ChangingServer(Server):
    """Cannot be reached, for another reason after some time, and then for the first one."""

    reasons = 3 * ["it is down"] + 3 * ["its certificate is another's"] + ["it is down"]

    def connect(self, key: StreamKey, on_ack: object) -> Server:
        if self.reasons:
            raise TransportError(self.reasons.pop(0))
        return super().connect(key, on_ack)


def test_each_reason_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, said = waits_of_orphan(ChangingServer(StreamOffset(0, 0), None), 1, monkeypatch, caplog)
    assert said == ["cannot", "cannot", "works again"]
    assert "its certificate is another's" in caplog.messages[1]
