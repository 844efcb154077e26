"""The client of a control socket meets a process that is gone, silent or wrong, and the server such clients."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostcallback.receiver.control import client as control_client, protocol, socket_path
from hostcallback.receiver.control.client import ControlClient, processes
from hostcallback.receiver.control.commands import set_knob
from hostcallback.receiver.control.protocol import ControlError, ControlSocketError, NoSuchTapError
from hostcallback.receiver.control.server import OPEN_TRIES, ControlServer
from hostcallback.receiver.control.socket_path import Peer
from threads import wait_for

PID = os.getpid()
NO_PID = 99_999_999


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder of sockets; its user is not the superuser, to whom no socket is closed."""
    user = os.geteuid() or 65534
    monkeypatch.setattr(os, "geteuid", lambda: user)
    # Not below `tmp_path`: the names of sockets are limited to 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", short)
        found = Path(short, f"hostcallback-{user}")
        monkeypatch.setattr(
            control_client, "sockets", lambda: {int(path.stem): path for path in found.glob("*.sock")}
        )
        yield found


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    """Listens in place of this process's control socket."""
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.bind(str(folder / f"{PID}.sock"))
        found.listen()
        yield found


@pytest.fixture
def pair(listener: socket.socket) -> Iterator[tuple[ControlClient, socket.socket]]:
    """A client, and the other end of its connection."""
    with ControlClient(PID) as client:
        other, _ = listener.accept()
        with other:
            yield client, other


def test_a_process_that_does_not_answer_is_given_up(listener: socket.socket) -> None:
    text = f"process {PID} did not answer within 0.02 s: it is stopped, or holds Python's interpreter lock"
    with ControlClient(PID, 0.02) as client, pytest.raises(ControlSocketError, match=f"^{text}$"):
        client.ask("process")


def test_a_process_that_closes_the_connection_is_gone(pair: tuple[ControlClient, socket.socket]) -> None:
    client, other = pair
    other.sendall(b'{"version": 1, "result": ')
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(ControlSocketError, match=f"^process {PID} is gone: it closed the connection$"):
        client.ask("process")
    other.close()
    with pytest.raises(ControlSocketError, match=f"^process {PID} is gone: .*Broken pipe"):
        client.ask("process")


def test_each_request_gets_its_own_answer(pair: tuple[ControlClient, socket.socket]) -> None:
    client, other = pair
    other.sendall(b'{"version": 1, "result": 5}\n{"version": 1, "result": [6]}\n{"version": 1}\n')
    assert [client.ask("first", x=1), client.ask("second"), client.ask("third")] == [5, [6], None]
    first = other.recv(1 << 16).splitlines()[0]
    assert first == b'{"version": 1, "command": "first", "arguments": {"x": 1}}'


@pytest.mark.parametrize(("above", "text"), [(0, None), (1, "is gone: its answer does not end")])
def test_an_answer_has_a_limit(
    pair: tuple[ControlClient, socket.socket], monkeypatch: pytest.MonkeyPatch, above: int, text: str | None
) -> None:
    client, other = pair
    answer = protocol.pack({"result": "x" * 50})
    monkeypatch.setattr(protocol, "MAX_RESPONSE", len(answer) - above)
    other.sendall(answer)
    if text is None:
        assert client.ask("process") == "x" * 50
    else:
        with pytest.raises(ControlSocketError, match=text):
            client.ask("process")


@pytest.mark.parametrize(
    ("kind", "error"), [("NoSuchTapError", NoSuchTapError), ("KeyError", ControlError), (None, ControlError)]
)
def test_an_error_is_raised_in_its_kind_and_cannot_command_the_terminal(
    pair: tuple[ControlClient, socket.socket], kind: str | None, error: type[Exception]
) -> None:
    client, other = pair
    other.sendall(protocol.pack({"error": "no\x1b[2J", "kind": kind}))
    with pytest.raises(error, match=r"^no\\x1b\[2J$") as raised:
        client.ask("taps")
    assert type(raised.value) is error


def no_socket(folder: Path) -> None:
    """Without a socket."""


def dead_socket(folder: Path) -> None:
    """Of a process that has ended."""
    folder.mkdir(mode=0o700)
    for pid in (PID, NO_PID):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ended:
            ended.bind(str(folder / f"{pid}.sock"))


@pytest.mark.parametrize("make", [no_socket, dead_socket])
def test_why_a_process_cannot_be_reached(folder: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    with pytest.raises(ControlSocketError, match=f"^process {PID} has no control socket: it does not use"):
        ControlClient(PID)
    with pytest.raises(ControlSocketError, match=f"^no process {NO_PID} exists: `hcb ctl` lists the proc"):
        ControlClient(NO_PID)
    with pytest.raises(ControlSocketError, match=f"^{10**20} is not a process id$"):
        ControlClient(10**20)

    def refuse(pid: int, signal: int) -> None:
        assert signal == 0, "no signal is sent"
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(ControlSocketError, match=f"^process {PID} belongs to another user: run hcb as that"):
        ControlClient(PID)


def test_a_file_in_place_of_a_socket_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    path = folder / f"{PID}.sock"
    path.write_text("a file")
    with pytest.raises(ControlSocketError, match=f"^{path} is neither a folder nor a socket: remove it"):
        ControlClient(PID)


@pytest.mark.parametrize("user", [4242, 0])
def test_a_socket_at_which_another_user_listens_is_a_trap(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(control_client, "peer_of", lambda connection: Peer(user, 7))
    if user == 0:
        ControlClient(PID).close()
        return
    path = listener.getsockname()
    text = f"^the process that listens at {path} belongs to user 4242, not to you: remove the socket$"
    with pytest.raises(ControlSocketError, match=text):
        ControlClient(PID)


@pytest.fixture
def handlers() -> dict[str, Any]:
    """The commands of the server."""
    return {"process": lambda arguments, client: "here"}


@pytest.fixture
def server(folder: Path, handlers: dict[str, Any]) -> Iterator[ControlServer]:
    """Answers for this process."""
    found = ControlServer(handlers)
    yield found
    found.stop()


def test_processes_are_described_in_the_order_of_their_ids(folder: Path, handlers: dict[str, Any]) -> None:
    later = ControlServer({"process": lambda arguments, client: "there"})
    later.path.rename(folder / f"{NO_PID + 1}.sock")
    server = ControlServer(handlers)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ended:
        ended.bind(str(folder / f"{NO_PID}.sock"))
    assert processes() == ["here", "there"], "one that has ended is left out"
    server.stop()
    assert processes() == ["there"]
    later.stop()


def test_a_client_that_is_connected_when_the_server_stops_is_told(
    folder: Path, handlers: dict[str, Any]
) -> None:
    server = ControlServer(handlers)
    left: list[str] = []
    handlers["stay"] = lambda arguments, client: client.on_close.append(lambda: left.append("left"))
    with ControlClient(PID) as client:
        client.ask("stay")
        server.stop()
        assert left == ["left"]
        with pytest.raises(ControlSocketError, match=f"process {PID} is gone"):
            client.ask("process")
    with pytest.raises(ControlSocketError, match="has no control socket"):
        ControlClient(PID)


def test_a_client_whose_end_fails_does_not_end_the_server(
    server: ControlServer, handlers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a mistake of ours")

    handlers["fail"] = lambda arguments, client: client.on_close.append(fail)
    with ControlClient(PID) as client:
        client.ask("fail")
    wait_for(lambda: "the control socket could not serve a client" in caplog.text)
    assert "RuntimeError: a mistake of ours" in caplog.text
    with ControlClient(PID) as client:
        assert client.ask("process") == "here"


@pytest.mark.parametrize("removals", [OPEN_TRIES - 1, OPEN_TRIES])
def test_a_folder_that_the_system_removes_meanwhile_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    named = socket_path.unpublished_name
    tries: list[Path] = []

    def removed_first(around: Path) -> Path:
        tries.append(around)
        if len(tries) <= removals:
            shutil.rmtree(around)
        return named(around)

    monkeypatch.setattr(socket_path, "unpublished_name", removed_first)
    if removals == OPEN_TRIES:
        with pytest.raises(FileNotFoundError):
            ControlServer({})
    else:
        server = ControlServer({})
        assert [path.name for path in folder.iterdir()] == [f"{PID}.sock"]
        server.stop()
    assert len(tries) == OPEN_TRIES


@pytest.mark.parametrize("arguments", [{}, {"name": "lr"}, {"value": 1}, {"name": 7, "value": 1}])
def test_a_knob_is_set_by_its_name_and_a_value(arguments: dict[str, Any]) -> None:
    with pytest.raises(ControlError) as raised:
        set_knob(arguments)
    assert str(raised.value) == f"a knob is set by its name and a value, got {arguments}"
