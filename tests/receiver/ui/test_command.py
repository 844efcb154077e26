"""The command `hcb ui` says in one line why it cannot serve, and serves by TLS beyond this machine."""

from __future__ import annotations

import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from certificates import Authority
from checkout import ROOT
from hostcallback.receiver.cli import main

httpx = pytest.importorskip("httpx", reason="these tests need httpx")
pytest.importorskip("starlette", reason="the page needs hostcallback[ui]")

Serve = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is reached from other machines"),
        (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key belong together"),
        (["nowhere"], "nowhere: no such tap log: give the folder"),
        (["4194305"], "no process 4194305 exists"),
    ],
)
def test_wrong_arguments_are_one_line(
    log: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ui", "--no-browser", str(log), *arguments]) == 1
    errors = capsys.readouterr().err
    assert problem in errors
    assert errors.count("\n") == 1


def test_a_source_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ui"])
    assert "give a LOG, the PID of a running process, or a collector" in capsys.readouterr().err


def test_short_tokens_and_ports_in_use_are_refused(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("short\n")
    token.chmod(0o644)
    assert main(["ui", "--no-browser", str(log), "--token-file", str(token)]) == 1
    assert f"other users may read this token: chmod 600 {token}" in capsys.readouterr().err
    token.chmod(0o600)
    assert main(["ui", "--no-browser", str(log), "--token-file", str(token)]) == 1
    assert "the token has 5 characters, expected at least 16" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["ui", "--no-browser", str(log), "--port", str(taken.getsockname()[1])]) == 1
    assert "--port 0 takes any free port" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_with_an_open_page_prints_nothing(log: Path) -> None:
    command = [sys.executable, "-m", "hostcallback.receiver.cli", "ui", "--no-browser", str(log)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        address, _, token = server.stdout.readline().strip().partition("#token=")
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.stream("GET", f"{address}api/events", headers=headers, timeout=30) as events:
            assert next(events.iter_lines()).startswith("retry")
            server.send_signal(signal.SIGINT)
            _, error = server.communicate(timeout=30)
    assert (server.returncode, error) == (130, "")


@pytest.mark.slow
def test_no_token_is_on_the_command_line_of_the_browser(log: Path, tmp_path: Path) -> None:
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}.new; mv {told}.new {told}\n')
    browser.chmod(0o755)
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "hostcallback.receiver.cli", "ui", str(log)]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    try:
        with subprocess.Popen(command, stdin=terminal, stdout=terminal, cwd=ROOT, env=environment) as server:
            with open(ours, closefd=False) as screen:
                address = screen.readline().strip()
            ends = time.monotonic() + 30
            while not told.exists():
                assert time.monotonic() < ends
            page = Path(told.read_text().strip().removeprefix("file://"))
            assert page.stat().st_mode & 0o777 == 0o600
            assert f'url={address}"' in page.read_text()
            server.send_signal(signal.SIGINT)
    finally:
        os.close(ours)
        os.close(terminal)
    assert "#token=" in address
    assert not page.exists()


def test_missing_packages_come_with_the_install_hint(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["ui", "--no-browser", str(log)]) == 1
    assert "pip install 'hostcallback[ui]'" in capsys.readouterr().err


def test_beyond_this_machine_it_serves_by_tls_to_names_that_were_given(
    log: Path, serve: Serve, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.sign("page")
    served = serve(
        log,
        host="0.0.0.0",
        tls_cert=str(certificate),
        tls_key=str(key),
        hosts=("train.example",),
        token="t" * 32,
    )
    port = served.base_url.port
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted) as client:
        session = client.post("/api/session", headers={"Authorization": f"Bearer {'t' * 32}"}).json()[
            "session"
        ]
        with_session = {"Authorization": f"Bearer {session}"}
        assert client.get("/api/overview", headers=with_session).json()["errors"] == 1
        for host, status in (("train.example", 200), ("10.1.2.3:80", 200), ("evil.example", 421)):
            headers = {"Host": host, "Authorization": f"Bearer {'t' * 32}"}
            assert client.get("/api/overview", headers=headers).status_code == status
