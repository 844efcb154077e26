"""What a collector relays between clients and processes, and whom it refuses, in one process."""

from __future__ import annotations

import json
import queue
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from collecting import responses, wait_for
from hostcallback.receiver.control.protocol import ControlError, pack
from hostcallback.receiver.errors import StreamRefusedError
from hostcallback.receiver.remote.collector.access import Access, Limits
from hostcallback.receiver.remote.control import relay
from hostcallback.receiver.remote.control.client import CollectorControl
from hostcallback.receiver.remote.control.protocol import encode_asking, encode_process
from hostcallback.receiver.remote.control.rule_store import NAME
from hostcallback.receiver.remote.forwarding_protocol import ASK, CONTROL, SERVICE, StreamKey
from hostcallback.receiver.remote.options import Forward
from served import Served, served

Code = grpc.StatusCode
ABOUT = {"host": "here", "pid": 7, "command": "train.py", "started": 1.5}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Has no processes, and no rules."""
    with served(tmp_path_factory.mktemp("log")) as found:
        yield found


def hello(run: str = "exp", process: int = 0, epoch: str = "a") -> bytes:
    return encode_process(StreamKey(run, process, epoch * 16), ABOUT)


class Process:
    """A process that answers as the test says: request by request."""

    def __init__(self, channel: grpc.Channel, first: bytes, token: str) -> None:
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers.put(first)
        metadata = (("authorization", f"Bearer {token}"),)
        self._call = channel.stream_stream(f"/{SERVICE}/{CONTROL}")(
            iter(self._answers.get, None), metadata=metadata, timeout=60
        )

    def next(self) -> tuple[int, int, dict[str, Any]]:
        """Session, number and content of the next request; the end of a session has no content."""
        request = next(self._call)
        session, number = struct.unpack_from("<QQ", request)
        return session, number, json.loads(request[16:]) if number else {}

    def answer(self, number: int, result: Any) -> None:
        self._answers.put(struct.pack("<Q", number) + pack({"result": result}))

    def error(self) -> tuple[Any, str]:
        """Status and text with which the collector ends the call, after the requests in transit."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self._call:
                pass
        error: Any = caught.value
        return error.code(), error.details()

    def leave(self) -> None:
        self._answers.put(None)


@contextmanager
def process(collector: Served, first: bytes, token: str = "") -> Iterator[Process]:
    with grpc.insecure_channel(collector.address) as channel:
        made = Process(channel, first, token)
        try:
            yield made
        finally:
            made.leave()


@contextmanager
def client(collector: Served, runs: str = "*", token: str = "") -> Iterator[CollectorControl]:
    with CollectorControl(Forward(collector.address, token=token), runs) as control:
        yield control


def call(collector: Served, method: str, *messages: bytes, token: str = "") -> tuple[Any, str]:
    """Status and text with which the collector refuses a call."""
    found, error = responses(collector.address, f"/{SERVICE}/{method}", *messages, token=token)
    assert not found
    return error.code(), error.details()


def test_a_process_gets_requests_by_session_and_their_ends(tmp_path: Path) -> None:
    with served(tmp_path) as collector, process(collector, hello()) as one:
        assert one.next() == (0, 1, {"version": 1, "command": "rules", "arguments": {"said": []}})
        one.answer(1, {})
        with client(collector) as first, client(collector, "e*") as second:
            assert first.ask("taps", seconds=0.001).told[0].is_silent
            session_of_first, *request = one.next()  # they may have come in either order
            assert request == [2, {"version": 1, "command": "taps", "arguments": {}}]
            # It has not answered: no second question is sent, nor waited for.
            assert first.ask("knobs", seconds=30, more=1).told[0].is_silent
            one.answer(2, ["late"])
            for session, number, control in ((3 - session_of_first, 3, second), (session_of_first, 4, first)):
                with ThreadPoolExecutor(1) as pool:
                    asked = pool.submit(control.ask, "knobs", seconds=30, more=number)
                    assert one.next() == (
                        session, number, {"version": 1, "command": "knobs", "arguments": {"more": number}}
                    )  # fmt: skip
                    one.answer(number, [number])
                    assert [told.result for told in asked.result().told] == [[number]]
        assert sorted(one.next()[:2] for _ in range(2)) == [(1, 0), (2, 0)]


def test_clients_reach_the_runs_that_they_ask_for_and_may_control(tmp_path: Path) -> None:
    access = Access({"w": ("mine-*", "other")}, {"c": ("mine-*",), "all": ("*",)})

    def reached(runs: str, token: str) -> list[str]:
        with client(collector, runs, token) as control:
            return [told.process.key.run for told in control.ask("process", seconds=0.001).told]

    with served(tmp_path, access=access) as collector:
        with ExitStack() as stack:
            for run in ("mine-1", "mine-2", "other"):
                stack.enter_context(process(collector, hello(run), "w")).next()
            assert reached("*", "all") == ["mine-1", "mine-2", "other"]
            assert reached("*", "c") == ["mine-1", "mine-2"]
            assert reached("*1", "all") == ["mine-1"]
            assert reached("other", "c") == []
            with client(collector, "mine-2", "c") as control:
                control.ask("rules", seconds=0.001, pattern="x", settings={"every": 2})
            with client(collector, "other", "all") as control:
                control.ask("rules", seconds=0.001, pattern="y", settings={"every": 3})
            with client(collector, "*", "c") as control:
                assert control.ask("process", seconds=0.001).kept == [("mine-2", "x", "every", 2)]
            with (
                client(collector, "m*", "c") as control,
                pytest.raises(ControlError, match=r"not all of 'm\*'"),
            ):
                control.ask("rules", seconds=0.001, pattern="z", settings={"every": 3})
        with (
            client(collector, token="w") as control,
            pytest.raises(StreamRefusedError, match="this token may not control processes: grant it"),
        ):
            control.ask("process", seconds=0.001)
        with (
            client(collector, token="x") as control,
            pytest.raises(StreamRefusedError, match="the collector does not know this token"),
        ):
            control.ask("process", seconds=0.001)
        with process(collector, hello("mine"), "w") as one:
            assert one.error() == (Code.PERMISSION_DENIED, "this token does not grant the run mine")
        assert call(collector, CONTROL, hello("mine-1"))[0] is Code.UNAUTHENTICATED


def test_a_process_that_does_not_answer_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MAX_UNANSWERED", 2)
    with served(tmp_path) as collector, process(collector, hello()) as one, client(collector) as control:
        for number in range(1, 3):
            assert one.next()[1] == number
            asked = control.ask("rules", seconds=0.001, pattern="x", settings={"every": number})
            assert len(asked.told) == 1
        assert one.error() == (Code.RESOURCE_EXHAUSTED, "the process does not answer")
        wait_for(lambda: not control.ask("process", seconds=0.001).told, "its end")


def test_a_newer_connection_of_a_process_ends_the_older(tmp_path: Path) -> None:
    with served(tmp_path) as collector, process(collector, hello()) as older:
        older.next()
        with process(collector, hello()) as newer, process(collector, hello(process=1)) as other:
            newer.next()
            assert older.error() == (Code.ABORTED, "a newer connection of exp p0 (process 7 on here)")
            other.next()
            with client(collector) as control:
                found = control.ask("process", seconds=0.001).told
                assert [told.process.key.process for told in found] == [0, 1]


def test_clients_that_are_waiting_are_told_when_a_process_leaves(tmp_path: Path) -> None:
    with served(tmp_path) as collector, process(collector, hello()) as one, client(collector) as control:
        one.next()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(control.ask, "taps", seconds=30)
            one.next()
            one.leave()
            (told,) = asked.result().told
        assert told.is_silent
        wait_for(lambda: not control.ask("process", seconds=0.001).told, "its end")


def test_rules_that_cannot_be_stored_reach_no_process(tmp_path: Path) -> None:
    with served(tmp_path) as collector, process(collector, hello()) as one, client(collector) as control:
        one.next()
        (tmp_path / NAME).with_suffix(".new").mkdir()
        with pytest.raises(ControlError, match="the collector cannot store the rules: "):
            control.ask("rules", seconds=0.001, pattern="x", settings={"every": 2})
        assert control.ask("process", seconds=0.001).kept == []
        assert one.next()[2]["command"] == "process"
        assert not (tmp_path / NAME).exists()


def test_rules_are_taken_back_before_those_given_with_the_reset(tmp_path: Path) -> None:
    with served(tmp_path) as collector, client(collector) as control:

        def kept(**arguments: Any) -> list[tuple[Any, ...]]:
            return [tuple(one)[1:] for one in control.ask("rules", seconds=1, pattern="x", **arguments).kept]

        assert kept(settings={"every": 2, "rate": 1}) == [("x", "every", 2), ("x", "rate", 1)]
        assert kept(settings={"every": 3}) == [("x", "rate", 1), ("x", "every", 3)]
        assert kept() == [("x", "rate", 1), ("x", "every", 3)]
        assert kept(settings={"every": 4}, reset=True) == [("x", "every", 4)]
        assert kept(reset=True) == []


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"command": "fly"}, "'fly' cannot be sent to processes through a collector, only process, taps, rules"),
        ({"command": "taps", "arguments": []}, "'taps' cannot be sent"),
        ({"command": "taps", "seconds": 0}, "0 is not a time to wait, expected seconds, up to 60"),
        ({"command": "taps", "seconds": 60.5}, "60.5 is not a time to wait"),
        ({"command": "taps", "seconds": "1"}, "'1' is not a time to wait"),
        ({"command": "rules", "arguments": {"pattern": "x", "settings": {"when": "x > 1"}}}, "without predicates"),
        ({"command": "rules", "arguments": {"pattern": "x", "settings": {"every": 0}}}, "every is 0"),
        ({"command": "taps", "seconds": 60}, ""),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_relayed_are_explained(
    collector: Served, request_: dict[str, Any], said: str
) -> None:
    (found,), error = responses(collector.address, f"/{SERVICE}/{ASK}", encode_asking("*"), pack(request_))
    assert error is None
    process, line = msgpack.unpackb(found)
    answer = json.loads(line)
    assert process is None
    assert answer.get("error", "").startswith(said) or said in answer["error"]
    assert ("result" in answer) == (not said)


def test_a_request_may_have_as_many_bytes_as_the_limit(collector: Served) -> None:
    for nbytes, code in ((8192, None), (8193, Code.INVALID_ARGUMENT)):
        found, error = responses(
            collector.address,
            f"/{SERVICE}/{ASK}",
            encode_asking("*"),
            pack({"command": "taps"}).ljust(nbytes),
        )
        assert (len(found), error and error.code()) == (code is None, code)


@pytest.mark.parametrize("method", [CONTROL, ASK])
def test_callers_without_a_valid_first_message_are_refused(tmp_path: Path, method: str) -> None:
    with served(tmp_path, limits=Limits(hello_sec=0.02)) as collector:
        late = (Code.DEADLINE_EXCEEDED, "the client did not send its first message")
        assert call(collector, method) == late
        assert call(collector, method, b"\xc1")[0] is Code.INVALID_ARGUMENT
        silent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel(collector.address) as channel:
            waiting = channel.stream_stream(f"/{SERVICE}/{method}")(iter(silent.get, None), timeout=60)
            with pytest.raises(grpc.RpcError) as caught:
                next(waiting)
            silent.put(None)
        error: Any = caught.value
        assert (error.code(), error.details()) == late


def test_an_answer_to_no_request_ends_the_connection(tmp_path: Path) -> None:
    with served(tmp_path) as collector, process(collector, hello()) as one:
        one.next()
        one.answer(9, {})
        assert one.error() == (Code.INVALID_ARGUMENT, "there is no request 9")
