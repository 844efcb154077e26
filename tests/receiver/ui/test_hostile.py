"""The server stays up and bounded whatever logs contain and clients send."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

import hostcallback as hcb
from hostcallback.receiver.failures.told_failure import told_failures
from hostcallback.receiver.ui.index import taps
from hostcallback.receiver.ui.server import connections

Serve = Callable[..., Any]

HOSTILE_NAMES = "<script>alert(1)</script>", "\u202etxt.exe", "a\x1b[31m\n\x00b", "n" * 600


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/series?tap=999999", 404),
        ("/api/series?tap=-1", 400),
        ("/api/series?tap=" + "1," * 100, 400),
        ("/api/series?tap=0&from=nan", 400),
        ("/api/series?tap=0&from=1e999", 400),
        ("/api/series?tap=0&points=x", 400),
        ("/api/series?tap=0&axis=moon", 400),
        ("/api/array", 400),
        ("/api/array?tap=0&at=99999999999999999999999", 200),
        ("/api/texts?before=1.2", 400),
        ("/api/texts?before=1.2.%F0%9D%9F%99", 400),
        ("/api/texts?limit=-5", 200),
        ("/api/texts?q=" + "x" * 2000, 400),
        ("/api/overview?filter=" + "%5B" * 900, 200),
        ("/api/overview?limit=99999999999", 200),
        ("/api/overview?" + "x" * 40_000, 200),
        ("/api/diff?left=no&right=no", 404),
        ("/api/nothing", 404),
        ("/../../etc/passwd", 404),
        ("/%2e%2e/%2e%2e/__init__.py", 404),
        ("/api/events?watch=x", 400),
    ],
)
def test_bad_requests_are_answered_with_an_error(client: Any, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    if status == 400:
        assert "expected" in answer.json()["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"tap": 1}', b'{"tap": "*"}', b'{"tap": "*", "rate": "x"}', b'{"tap": "*", "when": 1}',
     b'{"tap": "*", "enabled": 3}', b'{"tap": "*", "rate": 1e999}', b"[" * 50_000, b'{"tap": "' + b"[" * 9000 + b'"}'],
)  # fmt: skip
def test_bad_rules_are_refused(client: Any, body: bytes) -> None:
    answer = client.post("/api/rules", content=body)
    assert answer.status_code == 400


def test_a_long_body_is_refused_before_it_is_read(client: Any) -> None:
    assert client.post("/api/rules", content=b"x" * 1_000_000).status_code == 413


def test_a_post_of_another_page_is_refused_even_with_the_token(log: Path, serve: Serve) -> None:
    client = serve(log)
    rule = {"tap": "*", "enabled": False}
    assert (
        "--control"
        in client.post("/api/rules", json=rule, headers={"Origin": str(client.base_url).rstrip("/")}).text
    )
    for origin in ("http://evil.example", "null", str(client.base_url).rstrip("/") + "0"):
        answer = client.post("/api/rules", json=rule, headers={"Origin": origin})
        assert (answer.status_code, "not from the page" in answer.json()["error"]) == (403, True)
    assert client.post("/api/rules", json=rule).status_code == 403
    assert client.post("/api/overview").status_code in (403, 405)


def test_names_and_texts_are_escaped_and_paths_in_logs_are_not_opened(tmp_path: Path, serve: Serve) -> None:
    with hcb.outfeed_receiver(record=tmp_path):

        @jax.jit
        def emit(x: Any) -> Any:
            for name in HOSTILE_NAMES:
                hcb.id_tap(ignore, x, name=name)
            hcb.print("\x1b]0;title\x07 {x}", x=x)
            return x

        emit(np.float32(1)).block_until_ready()
    client = serve(tmp_path)
    found = client.get("/api/overview")
    names = [tap["name"] for tap in found.json()["taps"]]
    assert HOSTILE_NAMES[0] in names  # the page shows it as text
    assert all(name.isprintable() for name in names)
    assert "\\x1b]0;title" in client.get("/api/texts").json()["lines"][-1]["text"]
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.slow
def test_half_requests_lock_nobody_out_and_end(
    log: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SEC", 2.0)
    client = serve(log)
    port = client.base_url.port
    with contextlib.ExitStack() as closing:
        stream = closing.enter_context(client.stream("GET", "/api/events"))  # an open page
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        half = []
        for _ in range(3 * connections.most_connections()):
            half.append(closing.enter_context(socket.create_connection(("127.0.0.1", port))))
            half[-1].sendall(b"GET /api/overview HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        fresh = closing.enter_context(
            httpx.Client(base_url=client.base_url, headers=client.headers, timeout=20)
        )
        assert fresh.get("/api/overview").status_code == 200
        for connection in half:  # the server ends all of them, some at once and the others after their time
            connection.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert any(line.startswith("data:") for line in lines)  # the page's stream is still there


def test_of_too_many_connections_the_oldest_ends_at_once(
    log: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(connections, "HEAD_SEC", 600.0)
    port = serve(log).base_url.port
    with contextlib.ExitStack() as closing:
        half = [closing.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(9)]
        half[0].settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert half[0].recv(1) == b""
        half[-1].sendall(b"GET /nothing HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        half[-1].settimeout(30)
        assert half[-1].recv(4) == b"HTTP"


def test_a_request_that_comes_byte_by_byte_gets_no_more_time(
    log: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SEC", 0.5)
    port = serve(log).base_url.port
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.05)
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while True:
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        break
        assert 0.3 < time.monotonic() - started < 20


def ignore(value: Any) -> None:
    """A tap function."""


@pytest.mark.parametrize("kept", [0, 10, 63, 64, 5000, 0.5, 0.999])
def test_a_cut_off_log_is_shown_as_far_as_it_goes(
    log: Path, serve: Serve, tmp_path: Path, kept: float
) -> None:
    (segment,) = log.iterdir()
    data = segment.read_bytes()
    (tmp_path / segment.name).write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    found = serve(tmp_path).get("/api/overview").json()
    assert [source["kind"] for source in found["sources"]] == ["log"]
    if kept == 0.999:
        assert found["runs"][0]["messages"] > 1000


def test_damaged_bytes_are_told_and_the_rest_is_shown(log: Path, serve: Serve, tmp_path: Path) -> None:
    (segment,) = log.iterdir()
    data = np.frombuffer(segment.read_bytes(), np.uint8).copy()
    data[len(data) // 2 : len(data) // 2 + 300] ^= 0x5A
    (tmp_path / segment.name).write_bytes(data.tobytes())
    (tmp_path / "other.hcblog").write_bytes(b"\x89PNG\r\n\x1a\n" * 100)
    found = serve(tmp_path).get("/api/overview").json()
    assert found["sources"][0]["message"]
    assert found["runs"][0]["messages"] > 500


def test_what_a_process_tells_of_its_failures_is_checked_and_bounded() -> None:
    good: dict[str, Any] = {
        "kind": "check", "name": "n" * 9000, "source_line": "a.py:1", "title": "t" * 9000, "values": "",
        "traceback": "\x1b[31m\nline" * 9000, "by_device": {str(n): 1 for n in range(9000)}, "first": 1.0, "last": 2,
    }  # fmt: skip
    wrong = [{"kind": "x"}, {"title": None}, {"by_device": {"cpu:0": -1}}, {"by_device": {"cpu:0": True}},
             {"by_device": []}, {"first": float("nan")}, {"last": "now"}]  # fmt: skip
    told = [7, None, {}, *[good | change for change in wrong], good, *[good] * 1000]
    found = list(told_failures(told))
    assert len(found) == 200 - 3 - len(wrong)
    assert (len(found[0].name), len(found[0].title), len(found[0].by_device)) == (1000, 1000, 256)
    assert "\x1b" not in found[0].traceback
    assert list(told_failures({"kind": "check"})) == []


def test_more_taps_than_are_kept_are_counted(
    log: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "MAX_TAPS", 3)
    client = serve(log)
    found = client.get("/api/overview").json()
    assert (len(found["taps"]), found["taps_left_out"]) == (3, 2)
    assert found["taps_total"] == 5
    assert "2 taps are left out" in found["sources"][0]["message"]
