"""The command `hcb ui` says in one line why it cannot serve, and serves by TLS beyond this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import webbrowser
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
        (["nowhere"], "nowhere: No such file or directory"),
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


def test_no_token_is_on_the_command_line_of_the_browser(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[Path, int, str]] = []

    def browse(url: str) -> None:
        path = Path(url.removeprefix("file://"))
        opened.append((path, path.stat().st_mode & 0o777, path.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", browse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with contextlib.suppress(KeyboardInterrupt):
        main(["ui", str(log)])
    ((path, mode, text),) = opened
    address = capsys.readouterr().out.strip()
    assert "token=" in address
    assert mode == 0o600
    assert f'url={address}"' in text
    assert not path.exists()


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
