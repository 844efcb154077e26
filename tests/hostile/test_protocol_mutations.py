"""Mutated messages between processes: each decoder returns, or raises its one documented error."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest

from collecting import CollectorProcess, Emitter, all_stored, forwarder, only
from hostcallback.receiver.control import protocol as lines
from hostcallback.receiver.control.commands import commands
from hostcallback.receiver.control.protocol import Client, handle_request
from hostcallback.receiver.control.server import ControlServer
from hostcallback.receiver.errors import BadStreamError
from hostcallback.receiver.remote import forwarding_protocol
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.control import protocol as control
from hostcallback.receiver.remote.control.rule_store import RuleStore
from hostcallback.receiver.remote.forwarding_protocol import StreamKey, StreamOffset
from hostcallback.receiver.remote.nats.collector import NatsStore
from hostcallback.receiver.remote.nats.connection import NatsServer, subject, token, untoken
from hostcallback.receiver.remote.nats.publication import Publication
from hostcallback.receiver.runtime.runtime import runtime
from mutations import EXAMPLES, examples, mutated_bytes, mutated_value, packed
from published_units import block_of, units

KEY = StreamKey("run", 0, "0123456789abcdef")
ABOUT = {"host": "h", "pid": 7, "command": "python train.py", "started": 1.5}
PLACE = StreamOffset(3, 64)
MESSAGES: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "hello": (forwarding_protocol.decode_hello, forwarding_protocol.encode_hello(KEY)),
    "position": (forwarding_protocol.decode_position, forwarding_protocol.encode_position(PLACE)),
    "followed": (
        forwarding_protocol.decode_followed,
        forwarding_protocol.encode_followed(KEY, forwarding_protocol.SegmentSlice(PLACE, b"x" * 99)),
    ),
    "process": (control.decode_process, control.encode_process(KEY, ABOUT)),
    "request": (control.decode_request, control.encode_request(1, 2, b"{}")),
    "answer": (control.decode_answer, control.encode_answer(1, b"{}")),
    "asking": (control.decode_asking, control.encode_asking("run*")),
    "told": (
        control.decode_told,
        control.encode_told(control.decode_process(control.encode_process(KEY, ABOUT)), b"{}"),
    ),
}


def mutations(data: bytes, choose: random.Random) -> Iterator[bytes]:
    """Mutations of a message: of its fields, if it is msgpack, and of its bytes."""
    with contextlib.suppress(ValueError, msgpack.UnpackException):
        yield packed(mutated_value(msgpack.unpackb(data), choose))
    yield mutated_bytes(data, choose)
    yield data[: choose.randrange(len(data) + 1)]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_the_protocol(name: str) -> None:
    decode, data = MESSAGES[name]
    choose = random.Random(name)
    decode(data)
    for _ in range(EXAMPLES):
        for message in mutations(data, choose):
            with contextlib.suppress(BadStreamError):
                decode(message)


def test_pieces_of_a_stream() -> None:
    choose = random.Random(1)
    for _ in range(EXAMPLES):
        decoder = forwarding_protocol.SliceDecoder()
        with contextlib.suppress(BadStreamError):
            for _ in range(8):
                numbers = (
                    choose.choice([0, 1, 2**20, 2**53, 2**64 - 1]),
                    choose.getrandbits(choose.choice([8, 53, 64])),
                )
                found = decoder.take(
                    choose.choice([struct.pack("<QQ", *numbers), b"", b"x" * 9, b"x" * (2 << 20)])
                )
                assert found is None or (found[0].segment >= 1 and len(found[1]) <= 1 << 20)


def test_publications_of_nats(tmp_path: Path) -> None:
    choose = random.Random(2)
    originals = [unit.encode() for unit in units(block_of([3] * 20))]
    store = Store(tmp_path)
    nats_store = NatsStore(store)
    decoded = 0
    for _ in range(examples(2)):
        for data in mutations(choose.choice(originals), choose):
            try:
                unit = Publication.decode(data)
            except BadStreamError:
                continue
            decoded += 1
            assert unit.subject.startswith("taps.")
            assert len(unit.message_id) < 1 << 20
            if decoded % 4 == 0:  # what the collector catches
                with contextlib.suppress(
                    ValueError, TypeError, LookupError, ArithmeticError, OSError
                ):  # as the collector
                    if not nats_store.has(unit, again=choose.random() < 0.5):
                        nats_store.append([unit])
    nats_store.close()
    store.close()
    assert decoded


def test_names_and_addresses_of_nats() -> None:
    choose = random.Random(3)
    characters = "a.b*> =%@:/,[]\x00\x1b\n\u202e\ud800ü日0"
    for _ in range(EXAMPLES):
        name = "".join(choose.choices(characters, k=choose.randrange(300)))
        escaped = token(name)
        assert not set(escaped) & set(".*> \t\n")
        assert escaped.isascii()
        assert "=h" in escaped[:2] or untoken(escaped) == name
        assert subject(name, 3, name).count(".") == 3
        with contextlib.suppress(ValueError):
            untoken(name)
        address = choose.choice(["nats://", "tls://", "", "nats:", "http://"]) + name
        try:
            shown = repr(NatsServer(url=address))
        except ValueError as error:
            shown = str(error)
        if "@" in name:
            secret = name.rpartition("@")[0].strip()
            assert len(secret) < 6 or "," in name or secret not in shown


def test_requests_to_a_process() -> None:
    choose = random.Random(4)
    handlers = commands(runtime)
    originals = [
        {"version": 1, "command": "process"},
        {"version": 1, "command": "taps", "arguments": {}},
        {
            "version": 1,
            "command": "rules",
            "arguments": {"pattern": "nothing*", "settings": {"every": 3, "rate": 2.0}},
        },
        {"version": 1, "command": "rules", "arguments": {"pattern": "*", "reset": True}},
        {"version": 1, "command": "figures", "arguments": {}},
    ]
    client = Client()
    for _ in range(EXAMPLES):
        line = _json(mutated_value(choose.choice(originals), choose))
        for data in (line, mutated_bytes(line, choose)):
            answer = json.loads(handle_request(handlers, data, client))
            assert answer.keys() in ({"version", "result"}, {"version", "error", "kind"})
            assert answer.get("kind") not in ("MemoryError", "AttributeError", "KeyError", "IndexError"), (
                data,
                answer,
            )
    client.closed()
    handle_request(handlers, lines.pack(originals[3]), client)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=bytes.hex).encode()
    except (TypeError, RecursionError):  # a key that JSON does not have, or nested too deep
        return b"[" * 5000


def test_the_control_socket_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(5)
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", short)
        server = ControlServer({"echo": lambda arguments, client: arguments})
        line = lines.pack({"command": "echo", "arguments": {"x": 1}})
        for _ in range(examples(4)):
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
                client.connect(os.fspath(server.path))
                client.sendall(b"".join(mutated_bytes(line, choose) for _ in range(choose.randrange(1, 4))))
                if choose.random() < 0.1:
                    client.sendall(b"x" * choose.choice([1, 70_000, 200_000]))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(server.path))
            client.settimeout(30)
            client.sendall(line)
            assert json.loads(client.recv(1000)) == {"version": 1, "result": {"x": 1}}
        server.stop()


def test_rules_in_a_collectors_folder() -> None:
    choose = random.Random(6)
    kept = RuleStore().with_setting("run", "loss*", {"every": 3}).with_setting("*", "*", {"enabled": False})
    for _ in range(EXAMPLES):
        for data in mutations(kept.encoded(), choose):
            with contextlib.suppress(ValueError, RecursionError):
                RuleStore.decoded(data)


@pytest.mark.slow
def test_a_collector_stays_up_and_serves_a_good_client(tmp_path: Path) -> None:
    choose = random.Random(7)
    names = {
        forwarding_protocol.FORWARD: "stream_stream",
        forwarding_protocol.FOLLOW: "unary_stream",
        forwarding_protocol.CONTROL: "stream_stream",
    }
    starts = [data for _, data in MESSAGES.values()]
    with (
        CollectorProcess(tmp_path, "--quiet") as collector,
        grpc.insecure_channel(collector.address) as channel,
    ):
        for _ in range(examples(8)):
            name = choose.choice([*names, forwarding_protocol.ASK])
            messages = [next(mutations(choose.choice(starts), choose)) for _ in range(choose.randrange(1, 4))]
            if choose.random() < 0.5:
                messages[0] = choose.choice(starts)
            method = getattr(channel, names.get(name, "stream_stream"))(
                f"/{forwarding_protocol.SERVICE}/{name}"
            )
            sent: Any = messages[0] if names.get(name) == "unary_stream" else iter(messages)
            call = method(sent, timeout=20)
            with contextlib.suppress(grpc.RpcError):
                next(call, None)
            call.cancel()
        good = forwarder(collector.address, tmp_path / "spool", run="good")
        Emitter(good).losses(100)
        good.close()
        assert collector.process.poll() is None
        assert collector.stop() == 0
    assert not [line for line in collector.errors if "Traceback" in line], collector.errors[-20:]
    assert only(all_stored(collector.log, "good")) == list(range(100))
