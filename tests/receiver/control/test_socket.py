"""The control socket: permitted users, answers to malformed requests, creation and removal."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import hostcallback as hcb
from controlled import ROOT, controlled
from hostcallback.receiver.control import socket_path
from hostcallback.receiver.control.client import ControlClient, processes
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.control.protocol import (
    MAX_REQUEST,
    ControlError,
    ControlSocketError,
    NoSuchTapError,
)
from hostcallback.receiver.control.socket_path import sockets
from hostcallback.receiver.runtime.runtime import runtime
from python_process import python_output, start_python

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become another user")
NOBODY = 65534


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process's control socket is in a separate folder."""
    endpoints.close()
    # Not below `tmp_path`: the names of sockets are limited to 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        around = Path(short, "sockets")
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", str(around))
        monkeypatch.delenv("HOSTCALLBACK_CONTROL_SOCKET", raising=False)
        yield around / f"hostcallback-{os.geteuid()}"
        endpoints.close()


@pytest.fixture
def seen_by_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Like `folder`, but readable by other users. (The folders of pytest are closed to them.)"""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", path)
        yield Path(path, f"hostcallback-{os.geteuid()}")
        endpoints.close()


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(30)
    client.connect(str(path))
    return client


def test_it_is_for_its_user_only(folder: Path) -> None:
    endpoints.start()
    path = folder / f"{os.getpid()}.sock"
    assert endpoints.socket_path == path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    endpoints.close()
    assert not path.exists()


def test_rules_are_set_and_shown(folder: Path) -> None:
    endpoints.start()
    program = hcb.jit(lambda x: hcb.id_tap(lambda v: None, x, name="over the socket"))
    program(1.0)
    with ControlClient(os.getpid()) as client:
        answer = client.ask("rules", pattern="over*", settings={"every": 7})
        assert answer == {"names": ["over the socket"], "rules": {"over the socket": "every=7"}}
        assert hcb.taps.rules == {"over*": "every=7"}
        (tap,) = [tap for tap in client.ask("taps") if tap["name"] == "over the socket"]
        assert (tap["rules"], tap["check"], tap["enabled"]) == ("every=7", False, True)
        client.ask("rules", pattern="over*", reset=True)
        assert hcb.taps.rules == {}
        with pytest.raises(
            NoSuchTapError, match="no tap is called 'over the sockt' so far; there are 'over the sock"
        ):
            client.ask("rules", pattern="over the sockt", settings={"every": 7})
        assert hcb.taps.rules == {}, "a name that is wrong changes nothing"
        with pytest.raises(ControlError, match="every is 0"):
            client.ask("rules", pattern="over*", settings={"every": 0})
        with pytest.raises(
            ControlError, match="no command 'fly', only figures, knobs, process, rules, set, stop, taps"
        ):
            client.ask("fly")
    hcb.barrier_wait()


def test_nonsense_is_answered_and_the_next_client_served(folder: Path) -> None:
    endpoints.start()
    path = endpoints.socket_path
    assert path is not None
    requests: list[bytes] = [
        b"hello\n",
        b"[1]\n",
        b'{"version": 2, "command": "process"}\n',
        b'{"version": 1}\n',
        b'{"version": 1, "command": "rules", "arguments": []}\n',
        b'{"version": 1, "command": "rules", "arguments": {"pattern": 3}}\n',
        b'{"version": 1, "command": "rules", "arguments": {"pattern": "*", "settings": {"when": 1}}}\n',
        b"[" * 10_000 + b"\n",
        b"\xff\xfe\n",
    ]
    for request in requests:
        with raw(path) as client:
            client.sendall(request)
            response = json.loads(client.makefile().readline())
            assert response["error"], request
    with raw(path) as client:  # half a request, and gone
        client.sendall(b'{"version"')
    with raw(path) as client:
        client.sendall(b"x" * (MAX_REQUEST + 10))
        assert "too long" in client.makefile().readline()
    with raw(path) as client:  # in pieces, and two at once
        for piece in (b'{"version": 1, "comm', b'and": "process"}\n{"version": 1, "command": "process"}\n'):
            client.sendall(piece)
        lines = client.makefile()
        assert [json.loads(lines.readline())["result"]["pid"] for _ in range(2)] == [os.getpid()] * 2


@pytest.mark.slow
def test_sockets_of_processes_that_are_gone_are_removed(folder: Path) -> None:
    with controlled(folder.parent) as process:
        path = folder / f"{process.pid}.sock"
        assert path.exists()
        process.kill()
        assert path.exists(), "no cleanup happened"
        with pytest.raises(ControlSocketError, match=f"no process {process.pid} exists"):
            ControlClient(process.pid)
    with controlled(folder.parent) as other:
        assert not path.exists()
        assert set(sockets()) >= {other.pid}
    assert not list(folder.iterdir()), "it tidied up when it ended"


@pytest.mark.slow
def test_processes_are_listed(folder: Path) -> None:
    with controlled(folder.parent) as process:
        (found,) = [p for p in processes() if p["pid"] == process.pid]
        assert "controlled_program.py" in found["command"]


def test_figures_are_counted_while_a_client_is_connected(folder: Path) -> None:
    endpoints.start()
    program = hcb.jit(lambda x: hcb.id_tap(lambda v: None, x, name="figured"))

    def deliver() -> None:
        program(jnp.zeros(10))
        hcb.barrier_wait()

    def figures(client: ControlClient) -> tuple[int, int]:
        (tap,) = [tap for tap in client.ask("figures")["taps"] if tap["name"] == "figured"]
        return tap["messages"], tap["bytes"]

    deliver()
    receivers = runtime.receivers()
    with ControlClient(os.getpid()) as client, ControlClient(os.getpid()) as other:
        assert figures(client) == figures(other) == (0, 0)
        for _ in range(3):
            deliver()
        assert figures(client) == (3, 120)
        other.close()
        client.ask("process")  # by now the other is gone
        deliver()
        assert figures(client) == (4, 160)
    moment = threading.Event()
    while any(receiver.dispatcher.tap_counters for receiver in receivers):
        moment.wait(0.01)
    deliver()


@pytest.mark.slow
def test_a_child_answers_for_itself_and_not_for_its_parent(folder: Path) -> None:
    program = """
import os, sys
import hostcallback as hcb, jax.numpy as jnp
from hostcallback.receiver.control.client import ControlClient
from hostcallback.receiver.control.endpoints import endpoints
endpoints.start()
path = endpoints.socket_path
child = os.fork()
if child == 0:
    assert endpoints.socket_path is None
    with ControlClient(os.getppid()) as client:
        assert client.ask("process")["pid"] == os.getppid()
    endpoints.start()
    assert endpoints.socket_path.name == f"{os.getpid()}.sock", live.socket_path
    endpoints.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert path.exists()
with ControlClient(os.getpid()) as client:
    assert client.ask("process")["pid"] == os.getpid()
"""
    environment = {"HOSTCALLBACK_CONTROL_DIR": str(folder.parent), "PYTHONPATH": str(ROOT)}
    python_output("-W", "ignore", "-c", program, timeout_sec=60, **environment)
    assert not list(folder.iterdir())


def as_another_user(code: str) -> str:
    """Output of the code, run by another user."""
    program = (
        "import json, os, socket\n"
        "from hostcallback.receiver.control.client import ControlClient, ControlSocketError\n"
        f"os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    )
    return python_output("-c", program, timeout_sec=60, PYTHONPATH=str(ROOT))


@as_root
def test_a_folder_of_another_user_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True)
    for foreign in (folder, folder.parent):
        os.chown(foreign, NOBODY, NOBODY)
        endpoints.start()
        assert endpoints.socket_path is None
        assert f"{foreign} belongs to the user {NOBODY}" in caplog.text
        assert "HOSTCALLBACK_CONTROL_DIR" in caplog.text
        os.chown(foreign, 0, 0)
        caplog.clear()
        endpoints.close()


@as_root
def test_a_socket_of_another_user_is_refused(seen_by_all: Path) -> None:
    foreign = seen_by_all.with_name(f"hostcallback-{NOBODY}")
    foreign.mkdir()
    os.chown(foreign, NOBODY - 1, NOBODY - 1)
    path = foreign / "4242.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o777)
        done = as_another_user("try: ControlClient(4242)\nexcept ControlSocketError as error: print(error)")
    assert f"{foreign} belongs to the user {NOBODY - 1}, and this process is {NOBODY}'s" in done


@as_root
def test_the_server_hangs_up_on_other_users(seen_by_all: Path, caplog: pytest.LogCaptureFixture) -> None:
    endpoints.start()
    seen_by_all.chmod(0o777)
    path = seen_by_all / f"{os.getpid()}.sock"
    path.chmod(0o777)
    printed = as_another_user(
        "client = socket.socket(socket.AF_UNIX)\n"
        f"client.connect({str(path)!r})\n"
        "try:\n"
        '    client.sendall(b\'{"version": 1, "command": "process"}\\n\')\n'
        "    print(client.recv(100))\n"
        "except OSError as error:\n"
        "    print(b'')\n"
    )
    assert printed == "b''\n"
    assert "refused process" in caplog.text
    assert f"of the user {NOBODY}" in caplog.text


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTCALLBACK_CONTROL_SOCKET", "0")
    endpoints.start()
    assert endpoints.socket_path is None
    assert not folder.exists()
    with pytest.raises(ControlSocketError, match="HOSTCALLBACK_CONTROL_SOCKET=0"):
        ControlClient(os.getpid())


def test_a_name_that_is_too_long_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", str(folder.parent / ("x" * 120)))
    endpoints.start()
    assert endpoints.socket_path is None
    assert "longer than the system allows" in caplog.text


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes | str]]:
    """Mode, inode, number of links and content of everything in and of a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        state = path.lstat()
        content: bytes | str = b""
        if stat.S_ISLNK(state.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(state.st_mode):
            content = path.read_bytes()
        found[str(path)] = state.st_mode, state.st_ino, state.st_nlink if path.is_file() else 0, content
    return found


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o750, 0o700])
def test_a_folder_that_is_used_otherwise_stays_as_it_is(folder: Path, tmp_path: Path, mode: int) -> None:
    used = folder.parent
    used.mkdir()
    (used / "notes.sock").write_text("a file")
    (used / "1234567.sock").write_text("a file that looks like ours")
    (used / "link.sock").symlink_to(tmp_path / "nowhere")
    (used / "7654321.sock").symlink_to(used / "notes.sock")
    (used / "folder.sock").mkdir()
    dead_socket(used / "database.sock")
    dead_socket(used / "2345678.sock")
    used.chmod(mode)
    before = snapshot(used)
    endpoints.start()
    assert endpoints.socket_path == folder / f"{os.getpid()}.sock"
    endpoints.close()
    after = snapshot(used)
    assert after.pop(str(folder))[0] == stat.S_IFDIR | 0o700
    assert after == before


def test_a_file_that_is_not_our_socket_stays_in_our_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / "1234567.sock").write_text("a file")
    (folder / "7654321.sock").symlink_to(folder / "2345678.sock")
    dead_socket(folder / "other.sock")
    before = snapshot(folder)
    dead_socket(folder / "2345678.sock")  # of a process that has ended
    dead_socket(folder / ".99999999-abcdef")  # of one that ended before it published it
    endpoints.start()
    endpoints.close()
    assert snapshot(folder) == before


@pytest.mark.parametrize("kind", ["link", "file", "open to others", "a file in place of the socket"])
def test_a_folder_that_another_could_have_made_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    match kind:
        case "link":
            folder.symlink_to(elsewhere)
        case "file":
            folder.write_text("a file")
        case "open to others":
            folder.mkdir()
            folder.chmod(0o755)
        case _:
            folder.mkdir(mode=0o700)
            (folder / f"{os.getpid()}.sock").write_text("a file")
    before = snapshot(tmp_path)
    endpoints.start()
    assert endpoints.socket_path is None
    assert f"cannot reach this process: {folder}" in caplog.text
    assert snapshot(tmp_path) == before


def test_a_socket_that_takes_a_stale_ones_place_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    path = folder / "123.sock"

    def listener() -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.bind(str(path))
        found.listen()
        return found

    listener().close()  # its file stays
    started: list[socket.socket] = []
    answers = socket_path.answers

    def answers_before_the_other_starts(asked: Path) -> bool:
        answer = answers(asked)
        if not started:
            path.unlink()
            started.append(listener())
        return answer

    monkeypatch.setattr(socket_path, "answers", answers_before_the_other_starts)
    socket_path.remove_stale(folder)
    raw(path).close()
    started[0].close()
    socket_path.remove_stale(folder)
    assert list(folder.iterdir()) == []


STARTS = """
import os, sys, time
from hostcallback.receiver.control.server import ControlServer
print("ready", flush=True)
for round in range(int(sys.argv[1])):
    sys.stdin.readline()
    server = ControlServer({})
    print(server.path, flush=True)
    sys.stdin.readline()
    if (round + os.getpid()) % 3:
        server.stop()
    else:  # as if it had been killed
        server.forget()
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_processes_that_start_together_all_answer(folder: Path) -> None:
    count, rounds = 12, 25
    running = [
        start_python("-c", STARTS, str(rounds), stdin=subprocess.PIPE, PYTHONPATH=str(ROOT))
        for _ in range(count)
    ]  # fmt: skip

    def answers_of() -> list[str]:
        found = []
        for process in running:
            assert process.stdout is not None
            found.append(process.stdout.readline().strip())
        return found

    def go() -> None:
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        assert answers_of() == ["ready"] * count
        for _ in range(rounds):
            go()
            expected = [str(folder / f"{process.pid}.sock") for process in running]
            assert answers_of() == expected
            for path in expected:
                raw(Path(path)).close()
            go()
            assert answers_of() == ["ended"] * count
        assert all(process.wait(60) == 0 for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


def test_an_error_of_a_command_is_its_answer(folder: Path) -> None:
    def double(arguments: dict[str, Any], connection: Any) -> Any:
        return arguments["x"] * 2

    endpoints.start()
    endpoints.handlers["double"] = double
    try:
        with ControlClient(os.getpid()) as client:
            assert client.ask("double", x=21) == 42
            with pytest.raises(ControlError, match="'x'"):
                client.ask("double")
    finally:
        del endpoints.handlers["double"]


def test_every_opened_file_is_closed(folder: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("the system does not list open files")
    endpoints.start()
    endpoints.close()
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        endpoints.start()
        with ControlClient(os.getpid()) as client:
            client.ask("process")
        endpoints.close()
    assert len(list(descriptors.iterdir())) == before
