"""Tokens and passwords are in no text that a user or another program sees, and do not go over a network in clear."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import socket
import string
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hostcallback as hcb
from hostcallback.receiver.cli import main
from hostcallback.receiver.control.commands import commands
from hostcallback.receiver.errors import RemoteError
from hostcallback.receiver.remote.collector.access import Access
from hostcallback.receiver.remote.collector.service import CollectFrom
from hostcallback.receiver.remote.nats.connection import NatsConnection, NatsServer
from hostcallback.receiver.remote.options import Forward
from hostcallback.receiver.remote.otlp.client import OtlpOptions
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.flight.recorder import PROCESS_FILE, FlightRecorder
from hostcallback.receiver.text import command_line, without_password

CHARACTERS = string.ascii_letters + string.digits + string.punctuation


def passwords() -> list[str]:
    """Passwords with every kind of character, also those with a meaning in URLs."""
    chance = random.Random(15)
    made = ["".join(chance.choices(CHARACTERS, k=chance.randint(8, 24))) for _ in range(100)]
    return [
        *made,
        "p@ss@word",
        "sla/sh/es",
        "co:l:ons",
        "ques?tion",
        "ha#sh#es",
        "com,mas,here",
        "[brackets",
        "%zz%zz",
    ]


def texts(call: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> str:
    """All visible output of a call: its result, its error with the causes, and its log messages."""
    caplog.clear()
    try:
        made = call()
        seen = f"{made!r} {made}"
        if dataclasses.is_dataclass(made):
            seen += "".join(str(getattr(made, name, "")) for name in ("shown", "shown_address"))
    except Exception as error:
        # A traceback also shows lines of this file, but no values of variables.
        seen = "".join(traceback.format_exception(error)) + repr(error)
    return seen + caplog.text


def parts(password: str) -> set[str]:
    """The secrets: the password, and each piece of it that is too long to occur by chance."""
    return {password} | {password[k : k + 6] for k in range(len(password) - 5)}


MAKERS: list[Callable[[str], Any]] = [
    lambda secret: Forward("localhost:7070", token=secret),
    lambda secret: Forward("localhost", token=secret),
    lambda secret: Forward("elsewhere:7070", token=secret),
    lambda secret: Forward("elsewhere:7070", token=secret, insecure=True),
    lambda secret: Forward("localhost:7070", token=secret, when_full="never"),
    lambda secret: Forward("localhost:7070", token=secret + "\n"),
    lambda secret: Forward("localhost:7070", token=secret + "é"),
    lambda secret: Forward("localhost:7070", token=[secret]),  # type: ignore[arg-type]
    lambda secret: Forward(f"me:{secret}@localhost:7070"),
    lambda secret: Forward(f"http://me:{secret}@localhost:7070"),
    lambda secret: Forward(f"http://me:{secret}@localhost"),
    lambda secret: Forward(f"nats://me:{secret}@localhost:4222"),
    lambda secret: Forward(f"tls://one:1,nats://me:{secret}@two:2", token=secret),
    lambda secret: NatsServer(url=f"nats://me:{secret}@localhost:4222", token=secret),
    lambda secret: NatsServer(url=f"nats://{secret}@elsewhere:4222"),
    lambda secret: NatsServer(url=f"tls://me:{secret}@one:1,me:{secret}@two:2"),
    lambda secret: NatsServer(url=f"tls://me:{secret}@one:port"),
    lambda secret: NatsServer(url=f"htp://me:{secret}@one"),
    lambda secret: CollectFrom(url=f"nats://me:{secret}@one:1", token=secret),
    lambda secret: Access({secret: ("*",)}, {secret: ("*",)}),
    lambda secret: OtlpOptions(headers={"authorization": f"Bearer {secret}"}),
    lambda secret: OtlpOptions(headers={"authorization": f"Bearer {secret}\n"}),
    lambda secret: OtlpOptions(headers={"authorization": [secret]}),  # type: ignore[dict-item]
    lambda secret: OtlpOptions(headers={"Authorization": secret}),
    lambda secret: OtlpOptions(endpoint="http://elsewhere:4317", headers={"x-api-key": secret}),
    lambda secret: OtlpOptions(endpoint=f"https://me:{secret}@elsewhere:4317"),
    lambda secret: hcb.outfeed_receiver(forward=f"me:{secret}@localhost:7070"),
    lambda secret: hcb.outfeed_receiver(sinks=f"nats://me:{secret}@localhost:4222"),  # type: ignore[arg-type]
    lambda secret: hcb.outfeed_receiver(sinks=[hcb.forward("localhost:1", token=secret), 3]),  # type: ignore[list-item]
]


@pytest.mark.parametrize("make", MAKERS)
def test_no_text_has_a_secret(make: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for password in passwords():
        seen = texts(lambda password=password: make(password), caplog)  # type: ignore[misc]
        found = [part for part in parts(password) if part in seen]
        assert not found, (password, found, seen)


def test_representations_show_the_rest() -> None:
    shown = repr(Forward("nats://me:secret@localhost:4222", token="secret", run="exp42"))
    assert shown.startswith("Forward(address='nats://localhost:4222', spool=None, run='exp42', ")
    assert "token=<hidden>" in shown
    assert "token=''" in repr(Forward("localhost:1"))


def test_lines_of_a_token_file_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("good exp*\n+secret1 +secret2 exp\n")
    path.chmod(0o600)
    with pytest.raises(RemoteError, match="line 2: word 2 is not a run") as raised:
        Access.from_file(path)
    assert "secret" not in str(raised.value)


def test_command_lines_are_told_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [
        "train.py",
        "--to=nats://me:secret@host:1",
        "tls://secret@host",
        "a@b",
        "nats://a:1,tls://me:secret@b:2",
    ]
    assert command_line(argv) == [
        "train.py",
        "--to=nats://host:1",
        "tls://host",
        "a@b",
        "nats://a:1,tls://b:2",
    ]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr("sys.orig_argv", argv)
    told = commands(runtime)["process"]({}, None)  # type: ignore[arg-type]
    assert "secret" not in json.dumps(told)
    folder = FlightRecorder(tmp_path).folder
    assert "secret" not in (folder / PROCESS_FILE).read_text()


LOCAL = ["localhost", "127.0.0.1", "127.9.8.7", "[::1]"]
REMOTE = [
    "elsewhere",
    "10.0.0.1",
    "0.0.0.0",
    "[2001:db8::1]",
    "localhost.example",
    "dns:///elsewhere",
    "ipv4:10.0.0.1",
]


@pytest.mark.parametrize("host", LOCAL)
def test_this_machine_needs_no_tls(host: str) -> None:
    assert Forward(f"{host}:7070", token="secret").token == "secret"
    NatsServer(url=f"nats://me:secret@{host}:4222", token="secret")
    OtlpOptions(endpoint=f"http://{host}:4317", headers={"authorization": "secret"})


@pytest.mark.parametrize("host", REMOTE)
def test_another_machine_gets_no_secret_in_clear(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        lambda **options: Forward(f"{host}:7070", token="secret", **options),
        lambda **options: hcb.forward(f"{host}:7070", token="secret", **options),
    ):
        with pytest.raises(ValueError, match=r"in clear.*give tls_ca.*insecure=True"):
            make()
        make(insecure=True)
        make(tls_ca="ca.pem")
    Forward(f"{host}:7070")
    monkeypatch.setenv("HOSTCALLBACK_TOKEN", "secret")
    with pytest.raises(ValueError, match="in clear"):
        Forward(f"{host}:7070")


@pytest.mark.parametrize("host", [host for host in REMOTE if "//" not in host and "ipv4" not in host])
def test_another_broker_gets_no_secret_in_clear(host: str) -> None:
    for fields in (
        {"url": f"nats://me:secret@{host}:1"},
        {"url": f"nats://secret@{host}"},
        {"url": f"nats://{host}", "token": "secret"},
        {"url": f"tls://me:secret@{host}:1, nats://me:secret@{host}:2"},
        {"url": f"nats://localhost:1,nats://{host}:2", "token": "secret"},
    ):
        with pytest.raises(ValueError, match=r"in clear.*tls://.*insecure=True"):
            NatsServer(**fields)  # type: ignore[arg-type]
        NatsServer(**fields, insecure=True)  # type: ignore[arg-type]
        NatsServer(**fields, tls_ca="ca.pem")  # type: ignore[arg-type]
    NatsServer(url=f"nats://{host}")
    NatsServer(url=f"tls://me:secret@{host}:1", token="secret")
    for name in ("authorization", "x-api-key", "x-honeycomb-team-token", "cookie"):
        with pytest.raises(ValueError, match=r"in clear.*https://"):
            OtlpOptions(endpoint=f"http://{host}:1", headers={name: "secret"})
        OtlpOptions(endpoint=f"http://{host}:1", headers={name: "secret"}, insecure=True)
        OtlpOptions(endpoint=f"https://{host}:1", headers={name: "secret"})
    OtlpOptions(endpoint=f"http://{host}:1", headers={"x-scope-orgid": "tenant"})


@pytest.mark.parametrize(
    "command",
    [["ctl", "--via"], ["top", "--once", "--via"], ["tail", "--from"]],
    ids=lambda command: command[0],
)
def test_commands_send_no_token_in_clear(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_TOKEN", "secret")
    assert main([*command, "elsewhere.invalid:7070"]) != 0
    said = capsys.readouterr().err
    assert "the token would go to elsewhere.invalid:7070 in clear" in said
    assert "--tls-ca" in said
    assert "(--insecure)" in said
    assert "'secret'" not in said
    assert main([*command, "elsewhere.invalid:7070", "--insecure"]) != 0
    assert "in clear" not in capsys.readouterr().err


def test_collectors_send_no_token_in_clear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_TOKEN", "secret")
    assert main(["collect", "--nats", "nats://elsewhere.invalid", "--log", str(tmp_path)]) != 0
    assert "the token would go to nats://elsewhere.invalid in clear" in capsys.readouterr().err


@contextmanager
def server_without_tls(info: dict[str, Any]) -> Iterator[tuple[int, list[bytes]]]:
    """Pretends to be a NATS server, and records its input."""
    told: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    connection.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
                    while data := connection.recv(1 << 16):
                        told.append(data)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], told
        thread.join(20)


@pytest.mark.parametrize(
    "info", [{}, {"tls_required": False}, {"tls_available": True}, {"auth_required": True}]
)
def test_a_server_that_offers_no_tls_gets_no_password(info: dict[str, Any]) -> None:
    pytest.importorskip("nats")
    with server_without_tls({"server_id": "x", "version": "2.10.0", "max_payload": 1 << 20, **info}) as (
        port,
        told,
    ):
        connection = NatsConnection(NatsServer(url=f"tls://me:secret@127.0.0.1:{port}", token="secret"))
        try:
            with pytest.raises(RemoteError, match="does not use TLS"):
                connection.open()
        finally:
            connection.close()
    assert b"secret" not in b"".join(told)


def test_addresses_are_shown_without_users() -> None:
    assert without_password("nats://me:secret@one:1,tls://two:2") == "nats://one:1,tls://two:2"
    assert without_password("localhost:7070") == "localhost:7070"
    assert without_password("me:secret@localhost:7070") == "localhost:7070"
