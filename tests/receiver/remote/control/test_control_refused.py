"""Malformed control requests: processes, collectors and clients that send them disturb no other, and get an error."""

from __future__ import annotations

import json
import os
import queue
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from collecting import CollectorProcess, Emitter, forwarder, only, responses, stored, wait_for
from hostcallback.receiver.control.protocol import pack
from hostcallback.receiver.remote.control import agent
from hostcallback.receiver.remote.control.client import CollectorControl, ProcessAnswer
from hostcallback.receiver.remote.control.protocol import encode_asking
from hostcallback.receiver.remote.forwarder import Forwarder
from hostcallback.receiver.remote.forwarding_protocol import (
    ASK,
    CONTROL,
    FORWARD,
    SERVICE,
    SliceDecoder,
    StreamKey,
    StreamOffset,
    encode_position,
)
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.sending.grpc_transport import GrpcTransport
from ports import free_port

Code = grpc.StatusCode
EPOCH = "0123456789abcdef"


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """One collector for all of the tests, and a process that forwards: no request may disturb it."""
    with CollectorProcess(tmp_path_factory.mktemp("refused"), "--quiet") as process:
        yield process


@pytest.fixture(scope="module")
def other(collector: CollectorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forwarder]:
    """The forwarding process."""
    with forwarder(collector.address, tmp_path_factory.mktemp("spool"), run="other") as recorder:
        wait_for(lambda: told(collector, "process", run="other"), "the process")
        yield recorder


def told(
    collector: CollectorProcess, command: str, *, run: str = "*", **arguments: Any
) -> list[ProcessAnswer]:
    """The answers of a run's processes, or their silence."""
    with CollectorControl(Forward(collector.address), run) as control:
        return control.ask(command, seconds=1.0, **arguments).told


def call(collector: CollectorProcess, method: str, *messages: bytes) -> tuple[list[bytes], Any]:
    """The responses, and the status at the end."""
    return responses(collector.address, f"/{SERVICE}/{method}", *messages)


def hello(**changes: Any) -> bytes:
    fields = {
        "version": 1, "run": "run", "process": 0, "epoch": EPOCH, "host": "here", "pid": 7, "command": "python x.py",
        "started": 1.5,
    }  # fmt: skip
    packed: bytes = msgpack.packb({**fields, **changes})
    return packed


@pytest.mark.parametrize(
    "first",
    [
        b"", b"\xc1", b"GET / HTTP/1.1", hello(version=2), hello(run="../../etc"), hello(process=-1),
        hello(epoch="0123"), hello(host=7), hello(host=None), hello(pid=-1), hello(pid="7"), hello(pid=2**40),
        hello(command=None), hello(started="now"), hello(started=float("nan")), hello(more=b"x" * 5000),
    ],
)  # fmt: skip
def test_a_process_without_an_identity(collector: CollectorProcess, other: Forwarder, first: bytes) -> None:
    found, error = call(collector, CONTROL, first)
    assert not found
    assert error.code() is Code.INVALID_ARGUMENT
    assert told(collector, "process", run="other")[0].result["pid"] == os.getpid()


@pytest.mark.parametrize(
    "answer",
    [b"", b"1234567", struct.pack("<Q", 1), struct.pack("<Q", 99) + b"{}", struct.pack("<Q", 0) + b"{}",
     b"\xff" * 1000, struct.pack("<Q", 1) + b"x" * ((1 << 20) + 1)],
)  # fmt: skip
def test_a_process_that_answers_without_a_question(
    collector: CollectorProcess, other: Forwarder, answer: bytes
) -> None:
    found, error = call(collector, CONTROL, hello(), answer)
    assert len(found) <= 1
    assert error.code() is Code.INVALID_ARGUMENT
    assert told(collector, "process", run="other")[0].result["pid"] == os.getpid()
    wait_for(lambda: not told(collector, "process", run="run"), "the other one to be gone")


class Process:
    """A process of a test's own making."""

    def __init__(self, address: str, first: bytes) -> None:
        self._channel = grpc.insecure_channel(address)
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers.put(first)
        self.call = self._channel.stream_stream(f"/{SERVICE}/{CONTROL}")(iter(self._answers.get, None))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._answers.put(None)
        self._channel.close()

    def answer_all(self, line: bytes) -> threading.Thread:
        """Gives the same answer to everything, on a thread."""

        def go_on() -> None:
            try:
                for request in self.call:
                    _, number = struct.unpack_from("<QQ", request)
                    if number:
                        self._answers.put(struct.pack("<Q", number) + line)
            except grpc.RpcError:
                pass

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        return thread


@pytest.mark.parametrize(
    "line",
    [b"hello\n", b"[]\n", b'{"version": 2}\n', b'{"version": 1}\n', b"\xff\xff\n", b"[" * 10_000, pack({"result": 7}),
     pack({"result": [7, {"name": 3}, {"name": "x"}, None]}), pack({"result": {"rules": {"a\x1b[2J": {}}}}),
     pack({"error": "\x1b[2J" * 10})],
)  # fmt: skip
def test_a_process_that_answers_nonsense(
    collector: CollectorProcess, other: Forwarder, line: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    from hostcallback.receiver.cli import main

    with Process(collector.address, hello(host="h\x1b[2J", command="c\x1b]0;\x07")) as process:
        process.answer_all(line)
        wait_for(lambda: len(told(collector, "process")) == 2, "both processes")
        for arguments in ([], ["*"], ["x", "--every", "2"], ["x", "--reset"]):
            assert main(["ctl", "--via", collector.address, "--timeout", "5", *arguments]) in (0, 1)
    printed = "".join(capfd.readouterr())
    assert "\x1b" not in printed
    assert "\x07" not in printed
    wait_for(lambda: len(told(collector, "process")) == 1, "the other one to be gone")


@pytest.mark.slow
def test_a_process_that_never_answers_is_sent_away(collector: CollectorProcess, other: Forwarder) -> None:
    with Process(collector.address, hello()) as process:
        wait_for(lambda: len(told(collector, "process")) == 2, "both processes")
        with CollectorControl(Forward(collector.address)) as control:
            for _ in range(3):  # a question for figures alone is not repeated before the answer
                silent = [
                    one.process.pid for one in control.ask("figures", seconds=0.1).told if one.is_silent
                ]
                assert 7 in silent
        with CollectorControl(Forward(collector.address), "run") as control:
            for number in range(300):
                asked = control.ask("rules", seconds=0.001, pattern="x", settings={"every": number + 1})
                if not asked.told:
                    break
        with pytest.raises(grpc.RpcError) as caught:
            for _ in process.call:
                pass
        error: Any = caught.value
        assert error.code() is Code.RESOURCE_EXHAUSTED
    told(collector, "rules", pattern="*", reset=True)


@pytest.mark.parametrize(
    "first", [b"", b"\xc1", hello(version=2), hello(run=7), hello(run=""), hello(run="x" * 129)]
)
def test_a_client_without_a_valid_request(
    collector: CollectorProcess, other: Forwarder, first: bytes
) -> None:
    found, error = call(collector, ASK, first)
    assert not found
    assert error.code() is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"hello", "is not JSON"), (b"[1]", "not of version"), (b"{}", "not of version"), (b"[" * 8000, "is not JSON"),
        (pack({"command": "fly"}), "cannot be sent"), (pack({"command": ["x"]}), "cannot be sent"),
        (pack({"command": "process", "arguments": []}), "cannot be sent"),
        (pack({"command": "process", "seconds": 1e9}), "not a time to wait"),
        (pack({"command": "process", "seconds": "x"}), "not a time to wait"),
        (pack({"command": "rules"}), "is no glob"),
        (pack({"command": "rules", "arguments": {"pattern": "x", "settings": [1]}}), "invalid settings"),
        (pack({"command": "rules", "arguments": {"pattern": "x", "settings": {"when": 1}}}), "without predicates"),
        (pack({"command": "rules", "arguments": {"pattern": "x", "settings": {"every": -1}}}), "every is -1"),
    ],
)  # fmt: skip
def test_a_client_that_asks_nonsense_is_told(
    collector: CollectorProcess, other: Forwarder, line: bytes, said: str
) -> None:
    found, error = call(collector, ASK, encode_asking("*"), line)
    assert error is None
    (answer,) = found
    process, response = msgpack.unpackb(answer)
    assert process is None
    assert said in json.loads(response)["error"]


def test_a_client_that_asks_too_much_at_a_time(collector: CollectorProcess, other: Forwarder) -> None:
    found, error = call(collector, ASK, encode_asking("*"), b"x" * 10_000)
    assert not found
    assert error.code() is Code.INVALID_ARGUMENT
    assert told(collector, "process")[0].result["pid"] == os.getpid()


class NoCollector(grpc.GenericRpcHandler):
    """Takes streams, and sends the given control requests; when all are answered it sends another one."""

    def __init__(self, *requests: bytes) -> None:
        self.requests = requests
        self.answers: queue.Queue[bytes] = queue.Queue()
        self.connections = 0

    def service(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        return grpc.stream_stream_rpc_method_handler(self.forward if method == FORWARD else self.control)

    def forward(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        next(messages)
        yield encode_position(StreamOffset(0, 0))
        decoder = SliceDecoder()
        for message in messages:
            if piece := decoder.take(message):
                yield encode_position(StreamOffset(piece[0].segment, piece[0].offset + len(piece[1])))

    def control(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.connections += 1
        next(messages)
        yield from self.requests
        for number, message in enumerate(messages, 1):
            self.answers.put(message)
            if number == len(self.requests):
                yield b"no request"


@contextmanager
def no_collector(*requests: bytes) -> Iterator[tuple[NoCollector, str]]:
    """Listens; gives the address."""
    handler = NoCollector(*requests)
    server = grpc.server(ThreadPoolExecutor(8), handlers=(handler,))
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        yield handler, f"localhost:{port}"
    finally:
        server.stop(0).wait()


def request(number: int, line: bytes, session: int = 1) -> bytes:
    return struct.pack("<QQ", session, number) + line


def test_as_many_clients_as_the_limit_control_a_process_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "MAX_SESSIONS", 4)
    line = pack({"command": "process"})
    requests = [request(number, line, session=number) for number in range(1, 6)]
    with no_collector(*requests) as (handler, address), forwarder(address, tmp_path / "spool"):
        *taken, last = [json.loads(handler.answers.get(timeout=60)[8:]) for _ in requests]
    assert [answer["result"]["pid"] for answer in taken] == [os.getpid()] * 4
    assert last["error"] == "too many clients control this process"


@pytest.mark.slow
def test_a_collector_that_asks_nonsense_is_answered_and_given_up(tmp_path: Path) -> None:
    asked = [
        b"hello", pack({"command": "fly"}), pack({"command": "process", "arguments": 7}), b"[" * 10_000,
        pack({"command": "rules"}), pack({"command": "rules", "arguments": {"said": [["x", {"when": 1}]]}}),
        pack({"command": "rules", "arguments": {"said": [["x" * 300, {"every": 2}]]}}),
        pack({"command": "rules", "arguments": {"said": [["x", {"every": 0}]]}}),
        pack({"command": "rules", "arguments": {"said": [["x"]]}}), pack({"command": "fly"}),
    ]  # fmt: skip
    requests = [request(number, line, session=number) for number, line in enumerate(asked, 1)]
    many = [request(100 + n, pack({"command": "process"}), session=100 + n) for n in range(60)]
    with no_collector(*requests, *many) as (handler, address):
        with forwarder(address, tmp_path / "spool") as recorder:
            Emitter(recorder).losses(100)
            assert recorder.drain(60)
            found = [handler.answers.get(timeout=60) for _ in (*requests, *many)]
            errors = [json.loads(answer[8:]).get("error") for answer in found]
            assert all(errors[: len(requests)])
            assert "fly" in errors[1]
            assert sum("too many" in str(error) for error in errors) == len(requests) + len(many) - 64
            wait_for(lambda: handler.connections >= 3, "another connection")
            Emitter(recorder).losses(100)
            assert recorder.drain(60)
        assert not recorder.unsent_bytes


def test_a_process_that_permits_no_control(collector: CollectorProcess, tmp_path: Path) -> None:
    with forwarder(collector.address, tmp_path / "spool", run="quiet", control=False) as recorder:
        Emitter(recorder).losses(10)
        assert recorder.drain(60)
        assert not told(collector, "process", run="quiet")
    assert only(stored(collector.log, "quiet")[0]) == list(range(10))


def test_the_figures_of_a_process_are_shown_through_the_collector(
    collector: CollectorProcess, other: Forwarder, capfd: pytest.CaptureFixture[str]
) -> None:
    from hostcallback.receiver.cli import main

    top = ["top", "--via", collector.address, "--run", "other", "--interval", "0.05"]
    assert main([*top, "--once", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [(one["run"], one["process"], one["pid"]) for one in shown["processes"]] == [
        ("other", 0, os.getpid())
    ]
    assert shown["silent"] == []
    assert main([*top, "--once"]) == 0
    assert capfd.readouterr().out.startswith("1 process(es)\n")


def test_a_process_with_two_streams_is_one_process(collector: CollectorProcess, tmp_path: Path) -> None:
    with forwarder(collector.address, tmp_path / "one", run="twice"):
        wait_for(lambda: told(collector, "process", run="twice"), "the first")
        with forwarder(collector.address, tmp_path / "two", run="twice") as second:
            Emitter(second).losses(10)
            assert second.drain(60)
            (found,) = told(collector, "process", run="twice")
            assert found.result["pid"] == os.getpid()
        assert len(told(collector, "process", run="twice")) == 1
    wait_for(lambda: not told(collector, "process", run="twice"), "its end")


def test_a_collector_that_is_not_there_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    call = GrpcTransport.call

    def counted(self: GrpcTransport, method: str, *arguments: Any) -> Any:
        asked.append(method)
        return call(self, method, *arguments)

    monkeypatch.setattr(GrpcTransport, "call", counted)
    control = agent.ControlThread(
        GrpcTransport(Forward(f"127.0.0.1:{free_port()}")), StreamKey("run", 0, EPOCH)
    )
    wait_for(lambda: len(asked) > 1, "a second attempt")
    threading.Event().wait(0.5)
    control.stop()
    assert len(asked) < 20
