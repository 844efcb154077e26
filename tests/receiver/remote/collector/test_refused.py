"""Clients that a collector does not want: refused with a status and a line, while the others go on."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from collecting import CollectorProcess, Emitter, all_stored, forwarder, only, responses, stored, wait_for
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.collector.access import Access
from hostcallback.receiver.remote.forwarding_protocol import SegmentSlice, StreamKey, StreamOffset
from hostcallback.receiver.remote.sending import sender
from ports import free_port
from served import served
from steady_client import SteadyClient

KEY = StreamKey("run", 0, "0123456789abcdef")
METHOD = f"/{forwarding_protocol.SERVICE}/{forwarding_protocol.FORWARD}"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """One collector for all of the tests: no request may disturb it, or a client that sends all the time."""
    folder = tmp_path_factory.mktemp("refused")
    with CollectorProcess(folder, "--quiet") as process:
        with SteadyClient(process.address, folder / "spool") as steady:
            yield process
        assert process.stop() == 0
    assert only(all_stored(process.log, "steady")) == list(range(steady.sent))


def wait_for_line(collector: CollectorProcess, *texts: str) -> None:
    """Waits until the collector's log has a line with all of these."""
    wait_for(
        lambda: any(all(text in line for text in texts) for line in collector.errors), f"a line about {texts}"
    )


def send(address: str, *messages: bytes, token: str = "") -> tuple[list[bytes], Any]:
    """The responses, and the status at the end."""
    return responses(address, METHOD, *messages, token=token)


def messages(piece: SegmentSlice) -> tuple[bytes, ...]:
    """A piece as a client sends it, with the position of each frame."""
    return forwarding_protocol.encode_place(piece.position), *forwarding_protocol.encode_bytes(piece.data)


def segment_bytes(folder: Path) -> tuple[StreamKey, bytes]:
    """A real segment, as a client sends it."""
    recorder = forwarder("localhost:1", folder / "spool", drain_sec=0.0)
    Emitter(recorder).losses(100)
    recorder.close()
    (stream,) = (folder / "spool").iterdir()
    key = StreamKey.of_folder(stream.name)
    assert key is not None
    return key, (stream / "000001.hcblog").read_bytes()


def hello(**changes: Any) -> bytes:
    fields = {"version": 1, "run": "run", "process": 0, "epoch": KEY.epoch}
    packed: bytes = msgpack.packb({**fields, **changes})
    return packed


@pytest.mark.parametrize(
    "first",
    [
        b"", b"\xc1", b"\x80", b"GET / HTTP/1.1", hello(version=2), hello(run="../../etc"), hello(run=".hidden"),
        hello(run=""), hello(run="a" * 65), hello(run=7), hello(process=-1), hello(process="0"), hello(process=True),
        hello(process=2**40), hello(epoch="0123"), hello(epoch="../../../etc/pas"), hello(epoch=None),
        hello(more=b"x" * 5000),
    ],
)  # fmt: skip
def test_a_client_without_a_good_hello_is_refused(collector: CollectorProcess, first: bytes) -> None:
    found, error = send(collector.address, first)
    assert not found
    assert error.code() is Code.INVALID_ARGUMENT
    wait_for_line(collector, "a stream from ", error.details())
    assert not [path for path in collector.log.rglob("*") if "etc" in path.name or "hidden" in path.name]


@pytest.mark.parametrize(
    ("position", "data", "code"),
    [
        (StreamOffset(1, 0), b"no segment" * 100, Code.INVALID_ARGUMENT),
        (StreamOffset(1, 64), b"x" * 64, Code.FAILED_PRECONDITION),
        (StreamOffset(0, 0), b"x" * 64, Code.INVALID_ARGUMENT),
        (StreamOffset(10**7, 0), b"x" * 64, Code.INVALID_ARGUMENT),
        (StreamOffset(1, 2**60), b"x" * 64, Code.INVALID_ARGUMENT),
        (StreamOffset(1, 0), b"", Code.INVALID_ARGUMENT),
    ],
)
def test_pieces_that_are_none_are_refused(
    collector: CollectorProcess, position: StreamOffset, data: bytes, code: Any
) -> None:
    found, error = send(collector.address, hello(epoch="a" * 16), *messages(SegmentSlice(position, data)))
    assert len(found) == 1  # the stored part of it
    assert error.code() is code
    wait_for_line(collector, "a" * 16, error.details())


def test_bytes_without_a_place_are_refused(collector: CollectorProcess) -> None:
    _, error = send(collector.address, hello(epoch="d" * 16), b"x" * 64)
    assert error.code() is Code.INVALID_ARGUMENT
    assert "before its position" in error.details()


@pytest.mark.parametrize("cut", [1, 8, 16, 17, 64])
def test_pieces_of_any_length_go_on_where_the_ones_before_end(
    collector: CollectorProcess, tmp_path: Path, cut: int
) -> None:
    key, data = segment_bytes(tmp_path)
    parts = [data[at : at + cut] for at in range(0, 20 * cut, cut)]  # a place has 16 bytes, too
    sent = (
        message for part in [*parts, data[20 * cut :]] for message in forwarding_protocol.encode_bytes(part)
    )
    found, error = send(
        collector.address,
        forwarding_protocol.encode_hello(key),
        forwarding_protocol.encode_place(StreamOffset(1, 0)),
        *sent,
    )
    assert error is None
    assert forwarding_protocol.decode_position(found[-1]) == StreamOffset(1, len(data))
    assert (collector.log / "run" / key.segment_name(1)).read_bytes() == data


@pytest.mark.slow
def test_a_message_that_is_too_long_is_refused(collector: CollectorProcess) -> None:
    for first in ((), (hello(epoch="b" * 16),)):
        _, error = send(collector.address, *first, b"x" * (2 << 20))
        assert error.code() is Code.INVALID_ARGUMENT
        wait_for_line(collector, "b" * 16 if first else "a stream from", "2097152 bytes")
        _, error = send(collector.address, *first, b"x" * (8 << 20))
        assert error.code() is Code.RESOURCE_EXHAUSTED  # by gRPC, which refuses it


def test_a_segment_of_another_stream_or_a_changed_one_is_refused(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    key, data = segment_bytes(tmp_path)
    other = hello(run=key.run, epoch="c" * 16)
    _, error = send(collector.address, other, *messages(SegmentSlice(StreamOffset(1, 0), data)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "says that it is" in error.details()
    wait_for_line(collector, "c" * 16, "says that it is")
    _, error = send(
        collector.address,
        forwarding_protocol.encode_hello(key),
        *messages(SegmentSlice(StreamOffset(2, 0), data)),
    )
    assert error.code() is Code.INVALID_ARGUMENT
    headers = [found.start() for found in re.finditer(rb"\xb6HLC", data)]
    for at in (9, 30, headers[0] + 20, headers[1] + 100):  # in the beginning, and in the headers of chunks
        changed = bytearray(data)
        changed[at] ^= 1
        piece = SegmentSlice(StreamOffset(3, 0), bytes(changed))
        _, error = send(collector.address, forwarding_protocol.encode_hello(key), *messages(piece))
        assert error.code() is Code.INVALID_ARGUMENT, at
        wait_for_line(collector, key.epoch, error.details())


def test_repeated_data_is_stored_once_and_a_gap_is_noticed(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    key, data = segment_bytes(tmp_path)
    half = len(data) // 2
    pieces = [SegmentSlice(StreamOffset(1, 0), data[:half]), SegmentSlice(StreamOffset(1, half), data[half:])]
    again = [
        pieces[0],
        pieces[0],
        pieces[1],
        pieces[0],
        SegmentSlice(StreamOffset(1, half - 10), data[half - 10 :]),
    ]
    found, error = send(
        collector.address, forwarding_protocol.encode_hello(key), *itertools.chain(*map(messages, again))
    )
    assert error is None
    assert forwarding_protocol.decode_position(found[-1]) == StreamOffset(1, len(data))
    assert (collector.log / "run" / key.segment_name(1)).read_bytes() == data
    gap = SegmentSlice(StreamOffset(1, len(data) + 64), b"x" * 64)
    _, error = send(collector.address, forwarding_protocol.encode_hello(key), *messages(gap))
    assert error.code() is Code.FAILED_PRECONDITION
    wait_for_line(collector, key.epoch, error.details())


def test_a_newer_connection_fences_the_older(collector: CollectorProcess) -> None:
    class Waiting:
        def __init__(self) -> None:
            self.first: list[bytes] = [hello(epoch="d" * 16)]

        def __iter__(self) -> Iterator[bytes]:
            return self

        def __next__(self) -> bytes:
            if self.first:
                return self.first.pop()
            raise_at_end.wait(60)
            raise StopIteration

    raise_at_end = threading.Event()
    with (
        grpc.insecure_channel(collector.address) as first,
        grpc.insecure_channel(collector.address) as second,
    ):
        older = first.stream_stream(METHOD)(Waiting(), timeout=60)
        next(older)
        newer = second.stream_stream(METHOD)(Waiting(), timeout=60)
        next(newer)
        with pytest.raises(grpc.RpcError) as error:
            next(older)
        assert error.value.code() is Code.ABORTED
        assert "newer" in error.value.details()
        wait_for_line(collector, "d" * 16, "a newer connection sends")
        assert newer.is_active()
        raise_at_end.set()


def test_the_collector_goes_on_for_everybody_else(collector: CollectorProcess, tmp_path: Path) -> None:
    with forwarder(collector.address, tmp_path / "spool", run="good") as recorder:
        Emitter(recorder).losses(100)
    found, _ = stored(collector.log, "good")
    assert only(found) == list(range(100))
    assert collector.process.poll() is None


@pytest.mark.slow
def test_tokens_decide_about_writing_runs(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# who\nall-of-them\nonly-mine mine mine-*\n")
    tokens.chmod(0o600)
    with CollectorProcess(tmp_path, "--quiet", "--token-file", str(tokens)) as collector:
        for token, run, good in [
            ("", "mine", False), ("wrong", "mine", False), ("only-mine", "other", False),
            ("only-mine", "mine-2", True), ("all-of-them", "other", True),
        ]:  # fmt: skip
            options = {"token": token, "run": run, "drain_sec": 30.0}
            with forwarder(collector.address, tmp_path / f"spool-{token}-{run}", **options) as recorder:
                Emitter(recorder).losses(3)
            assert (not recorder.unsent_bytes) is good, (token, run)
            if not good:
                assert "token" in recorder.refused
        collector.stop()
    assert sorted(path.name for path in collector.log.iterdir() if path.is_dir()) == ["mine-2", "other"]


def test_a_collector_that_refused_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "REFUSED_SEC", 0.1)
    port, tokens = free_port(), tmp_path / "tokens"

    def access(token: str) -> Access:
        tokens.write_text(token)
        tokens.chmod(0o600)
        return Access.from_file(tokens)

    with served(tmp_path / "log", access=access("new"), port=port) as collector:
        recorder = forwarder(collector.address, tmp_path / "spool", token="old", run="mine", drain_sec=30.0)
        Emitter(recorder).losses(3)
        wait_for(lambda: "token" in recorder.refused, "a refusal")
    with served(tmp_path / "log", access=access("old"), port=port):  # started again with the right one
        wait_for(lambda: not recorder.unsent_bytes, "the messages")
        assert not recorder.refused
        recorder.close()
    assert only(stored(tmp_path / "log", "mine")[0]) == [0, 1, 2]
    told = [
        line for line in caplog.messages if "cannot be forwarded at present" in line or "works again" in line
    ]
    assert ["the sender asks again every minute" in told[0], "works again" in told[-1]] == [True, True]
    assert len([line for line in told if "asks again" in line]) == 1
