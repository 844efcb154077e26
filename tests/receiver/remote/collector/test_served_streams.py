"""Streams and services of a collector in the test's own process: refusals, limits, and ends."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from collecting import responses
from hostcallback.receiver.errors import RemoteError
from hostcallback.receiver.remote.collector import service
from hostcallback.receiver.remote.collector.access import Access, Limits
from hostcallback.receiver.remote.collector.service import Collector, CollectorServer, run_until_told
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.forwarding_protocol import (
    FORWARD,
    SERVICE,
    StreamKey,
    StreamOffset,
    decode_position,
    encode_hello,
    encode_place,
)
from served import served

KEY = StreamKey("run", 0, "a" * 16)
METHOD = f"/{SERVICE}/{FORWARD}"
Code = grpc.StatusCode


def first(number: int = 1, offset: int = 0) -> tuple[bytes, bytes]:
    return encode_hello(KEY), encode_place(StreamOffset(number, offset))


@pytest.mark.parametrize("fsync", [True, False])
def test_what_is_sent_is_stored_and_acknowledged(segment: bytes, tmp_path: Path, fsync: bool) -> None:
    with served(tmp_path / "log", fsync=fsync) as collector:
        half = len(segment) // 2
        for sent, before in ((segment[:half], 0), (segment, half), (segment, len(segment))):
            found, error = responses(collector.address, METHOD, *first(), sent)
            assert error is None
            assert decode_position(found[0])[1] == before
            assert decode_position(found[-1]) == StreamOffset(1, len(sent))
    assert (tmp_path / "log" / "run" / KEY.segment_name(1)).read_bytes() == segment


def test_streams_that_cannot_be_stored_are_refused_with_the_reason(segment: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with served(folder) as collector:

        def refused(*messages: bytes) -> tuple[Any, str]:
            _, error = responses(collector.address, METHOD, *messages)
            return error.code(), error.details()

        code, text = refused(*first(1, 64), segment)
        assert (code, text) == (
            Code.FAILED_PRECONDITION, f"segment 1 of {KEY} does not start at its beginning"
        )  # fmt: skip
        assert refused(*first(2), segment)[0] is Code.INVALID_ARGUMENT
        (folder / "taken").write_text("a file where a folder of the run should be")
        code, text = refused(encode_hello(StreamKey("taken", 0, "a" * 16)))
        assert code is Code.RESOURCE_EXHAUSTED
        assert text.startswith("the collector cannot store it: ")


def test_a_client_must_say_in_time_which_stream_it_sends(tmp_path: Path) -> None:
    with served(tmp_path, limits=Limits(hello_sec=0.02)) as collector:
        said = "the client did not say which stream it sends"
        _, error = responses(collector.address, METHOD)
        assert (error.code(), error.details()) == (Code.DEADLINE_EXCEEDED, said)
        silent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel(collector.address) as channel:
            call = channel.stream_stream(METHOD)(iter(silent.get, None), timeout=60)
            with pytest.raises(grpc.RpcError, match=said):
                next(call)
            silent.put(None)


def test_a_token_decides_which_runs_are_stored(tmp_path: Path) -> None:
    with served(tmp_path, access=Access({"good": ("run", "x*")}, {})) as collector:
        for token, run, code in (
            ("good", "run", None), ("good", "x1", None), ("good", "run1", Code.PERMISSION_DENIED),
            ("bad", "run", Code.UNAUTHENTICATED),
        ):  # fmt: skip
            hello = encode_hello(StreamKey(run, 0, "a" * 16))
            _, error = responses(collector.address, METHOD, hello, token=token)
            assert (error and error.code()) == code, run
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "x1"]


def test_the_rate_of_a_stream_is_limited(segment: bytes, tmp_path: Path) -> None:
    rate = len(segment) / 1.03  # a second's bytes come at once
    with served(tmp_path / "log", limits=Limits(bytes_per_sec=rate)) as collector:
        began = time.monotonic()
        _, error = responses(collector.address, METHOD, *first(), segment)
        assert error is None
        assert time.monotonic() - began >= 0.028


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RemoteError, match=f"^cannot listen at {address}: "):
            CollectorServer(Collector(store), address).serve(pytest.fail)
    store.close()


def test_a_server_that_was_ended_before_it_served_ends_at_once(tmp_path: Path) -> None:
    store, ready = Store(tmp_path), threading.Event()
    server = CollectorServer(Collector(store), "localhost:0")
    server.end()
    thread = threading.Thread(target=server.serve, args=(ready.set,), daemon=True)
    thread.start()
    thread.join(30)
    assert (thread.is_alive(), ready.is_set()) == (False, True)
    store.close()


def test_a_server_that_ends_waits_for_the_last_work_of_cancelled_calls(tmp_path: Path) -> None:
    done, serving, cancelled = threading.Event(), threading.Event(), threading.Event()

    async def method(requests: object, context: object) -> None:
        serving.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await asyncio.sleep(0.3)
            done.set()

    handlers = grpc.method_handlers_generic_handler(
        "test", {"m": grpc.stream_stream_rpc_method_handler(method)}
    )
    store, ready = Store(tmp_path), threading.Event()
    server = CollectorServer(Collector(store), "localhost:0", handlers=[handlers])
    thread = threading.Thread(target=server.serve, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(30)
    with grpc.insecure_channel(server.where.removeprefix("at ")) as channel:
        call = channel.stream_stream("/test/m")(iter(()))
        assert serving.wait(30)
        call.cancel()
        assert cancelled.wait(30)
    server.end()
    thread.join(30)
    assert done.is_set()
    store.close()


class Service:
    """A service that collects nothing; raises when it is ready, or ends only when the test is over, if wanted."""

    where = "nowhere"

    def __init__(self, error: Exception | None = None, *, is_stuck: bool = False) -> None:
        self.ended = threading.Event()
        self.released = threading.Event()
        self._error = error
        self._is_stuck = is_stuck

    def serve(self, on_ready: Callable[[], None]) -> None:
        on_ready()
        if self._error is not None:
            raise self._error
        (self.released if self._is_stuck else self.ended).wait(30)

    def end(self) -> None:
        self.ended.set()


def test_when_a_service_fails_the_others_end_and_its_error_is_raised() -> None:
    failing, other = Service(RemoteError("no broker there")), Service()
    ready: list[Any] = []
    with pytest.raises(RemoteError, match=r"^no broker there$"):
        run_until_told([other, failing], ready.append)
    assert other.ended.is_set()
    assert failing in ready


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_services(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_SEC", 0.01)
    before = signal.getsignal(number)
    services = [Service(), Service()]
    ready: list[Any] = []

    def on_ready(one: Any) -> None:
        ready.append(one)
        if len(ready) == 2:
            early.append(one.ended.wait(0.02))
            os.kill(os.getpid(), number)

    early: list[bool] = []
    run_until_told(services, on_ready)
    assert early == [False]
    assert all(one.ended.is_set() for one in services)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("end_sec", "signals"), [(0.02, 1), (1e6, 2)])
def test_a_service_that_does_not_end_is_left_after_a_time_or_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, end_sec: float, signals: int
) -> None:
    monkeypatch.setattr(service, "LOOK_SEC", 0.01)
    monkeypatch.setattr(service, "END_SEC", end_sec)
    stuck, other = Service(is_stuck=True), Service(is_stuck=True)

    def told() -> None:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            other.ended.wait(30)

    sending = threading.Thread(target=told)
    run_until_told([stuck, other], lambda one: sending.start() if one is other else None)
    assert stuck.ended.is_set()
    sending.join()
    for one in (stuck, other):
        one.released.set()
