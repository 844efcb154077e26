"""The page shows and controls running processes, by their control sockets and through a collector."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import hcb_command
import hostcallback as hcb
from checkout import ROOT
from collecting import CollectorProcess
from hostcallback.receiver.control.endpoints import endpoints
from hostcallback.receiver.errors import HostCallbackError
from hostcallback.receiver.ui.index.log_index import LogIndex
from hostcallback.receiver.ui.live.processes import LiveProcesses, ProcessSource
from hostcallback.receiver.ui.live.source import DEVICE_NUMBERS, TAP_NUMBERS, is_process
from python_process import start_python

httpx = pytest.importorskip("httpx", reason="these tests need httpx")
pytest.importorskip("starlette", reason="the page needs hostcallback[ui]")

Serve = Callable[..., Any]

PROGRAM = Path(__file__).with_name("live_program.py")


@contextmanager
def running(folder: Path, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that taps; its control socket is in `folder`."""
    process = start_python(
        PROGRAM,
        *arguments,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        PYTHONPATH=str(ROOT),
        JAX_PLATFORMS="cpu",
        HOSTCALLBACK_CONTROL_DIR=str(folder),
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            # A thread makes the control socket after the first tap.
            until(lambda: list(folder.rglob(f"{process.pid}.sock")), bool)
            yield process
        finally:
            process.kill()


@contextmanager
def hcb_ui(*arguments: Any, **variables: Any) -> Iterator[Any]:
    """The command `hcb ui`, and a client with its token."""
    command = [sys.executable, "-m", "hostcallback.receiver.cli", "ui", "--no-browser", *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **{key: str(value) for key, value in variables.items()},
    }
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with server:
        try:
            assert server.stdout is not None
            base, _, token = server.stdout.readline().strip().partition("/#token=")
            headers = {"Authorization": f"Bearer {token}"}
            with httpx.Client(base_url=base, headers=headers, timeout=20) as client:
                client.server_pid = server.pid  # type: ignore[attr-defined]
                yield client
        finally:
            server.terminate()
            assert server.wait(20) in (0, -15)


def until(ask: Callable[[], Any], wanted: Callable[[Any], bool], seconds: float = 20) -> Any:
    """Asks until the answer is as wanted: each question takes the server's half second at most."""
    ends = time.monotonic() + seconds
    while not wanted(found := ask()):
        assert time.monotonic() < ends, found
    return found


def test_a_process_is_shown_with_its_log_and_controlled(sockets: Path, tmp_path: Path) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):

        def loss() -> Any:
            taps = client.get("/api/overview", params={"filter": "loss"}).raise_for_status().json()["taps"]
            (found,) = [tap for tap in taps if tap["name"] == "loss"] or [None]
            return found

        shown = until(
            loss, lambda tap: tap is not None and tap["kind"] == "scalar" and tap["enabled"] is True
        )
        until(loss, lambda tap: tap["count"] > shown["count"])  # the log is followed
        overview = client.get("/api/overview").json()
        assert {source["kind"]: source["state"] for source in overview["sources"]} == {"process": "live"}
        assert [run["live"] for run in overview["runs"]] == [True]
        # The check is in the log, too, and counts once. The process may have made only its first steps.
        groups = until(
            lambda: {group["kind"]: group for group in client.get("/api/errors").json()["groups"]},
            lambda groups: "check" in groups and groups.get("tap exception", {}).get("count", 0) >= 2,
        )
        assert [groups[kind]["count"] for kind in ("check", "tap exception")] == [1, 2]
        assert len(groups["check"]["per"]) == 1
        # All devices have the knob's value in their streams, in any order; cpu:0 runs the program.
        until(
            lambda: {row["device"]: row for row in client.get("/api/devices").json()["devices"]},
            lambda rows: rows["cpu:0"]["seconds_in_taps"] is not None and rows["cpu:0"]["rate"] > 0,
        )
        answer = client.post("/api/rules", json={"tap": "loss", "run": None, "enabled": False, "rate": None})
        assert answer.json() == {"applied": ["loss"]}
        off = until(loss, lambda tap: tap["enabled"] is False)
        last = until(
            lambda: (loss()["count"], loss()["count"]), lambda counts: counts[0] == counts[1] >= off["count"]
        )
        assert client.post("/api/rules", json={"tap": "loss", "enabled": True}).status_code == 200
        until(loss, lambda tap: tap["count"] > last[0])
        nothing = client.post("/api/rules", json={"tap": "los?s*x", "enabled": True})
        assert (nothing.status_code, "los?s*x" in nothing.json()["error"]) == (502, True)
        evil = client.post(
            "/api/rules", json={"tap": "*", "enabled": False}, headers={"Origin": "http://evil.example"}
        )
        assert evil.status_code == 403
        process.kill()
        ended = until(
            lambda: client.get("/api/overview").json(),
            lambda found: found["sources"][0]["state"] == "ended" and not found["runs"][0]["live"],
        )
        assert f"process {process.pid}" in ended["sources"][0]["message"]


@pytest.mark.slow
def test_errors_of_a_process_without_a_log_have_texts_and_lines(sockets: Path) -> None:
    with (
        running(sockets, "-") as process,
        hcb_ui(process.pid, HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        found = until(lambda: client.get("/api/errors").json()["groups"], lambda groups: len(groups) == 2)
        overview = client.get("/api/overview").json()
        assert (overview["error_kinds"], overview["errors"]) == (2, 3)
    check, raised = sorted(found, key=lambda group: group["kind"])
    assert (check["kind"], check["title"], check["values"]) == ("check", "two came: 2", "n = 2")
    assert raised["kind"] == "tap exception"
    assert (raised["title"], raised["count"]) == ("ValueError: a planted\\x1b bug of 0", 2)
    assert raised["values"] == "the last: ValueError: a planted\\x1b bug of 1"
    assert (raised["first"]["step"], raised["last"]["step"], check["first"]["step"]) == (0, 1, None)
    assert 'raise ValueError(f"a planted' in raised["traceback"]
    assert "\x1b" not in raised["traceback"]
    assert any("hcb.id_tap(fail_once" in text for _, text in raised["source"])
    (sender,) = raised["per"]
    assert (sender["process"].endswith(f":{process.pid}"), sender["device"]) == (True, "cpu:0")
    assert raised["first"]["time"] <= raised["last"]["time"]


@pytest.mark.slow_variants
@pytest.mark.parametrize("records", [False, True])
def test_a_check_is_listed_and_switched(sockets: Path, tmp_path: Path, records: bool) -> None:
    with (
        running(sockets, tmp_path / "log" if records else "-", "failing") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):

        def look() -> tuple[bool | None, int, int]:
            found = client.get("/api/overview").raise_for_status().json()
            shown = {tap["name"]: tap for tap in found["taps"] if tap["kind"] != "text"}
            check = shown.get("always", {"kind": "check", "enabled": None})
            assert check["kind"] == "check"
            return check["enabled"], found["errors"], shown.get("loss", {"count": 0})["count"]

        def switch(enabled: bool) -> None:
            answer = client.post("/api/rules", json={"tap": "always", "enabled": enabled})
            assert answer.json() == {"applied": ["always"]}

        _, before, messages = until(look, lambda found: found[0] is True and found[1] > 2)
        until(look, lambda found: found[1] > before and found[2] > messages)
        switch(False)
        off = [until(look, lambda found: found[0] is False)]
        # The steps that were under way have ended once fifty further ones leave the count as it is.
        until(
            lambda: off.append(look()) or off[-1],
            lambda found: found[2] >= 50 + min(each[2] for each in off if each[1] == found[1]),
        )
        switch(True)
        until(look, lambda found: found[0] is True and found[1] > off[-1][1])


@pytest.mark.slow
def test_knobs_are_set_and_loops_stopped_in_a_process(sockets: Path, tmp_path: Path) -> None:
    with (
        running(sockets, tmp_path / "log") as process,
        hcb_ui(process.pid, "--control", HOSTCALLBACK_CONTROL_DIR=sockets) as client,
    ):
        found = until(lambda: client.get("/api/knobs").json(), lambda found: bool(found["knobs"]))
        (knob,) = found["knobs"]
        assert (found["processes"], knob["name"], knob["values"], knob["default"]) == (
            1,
            "damping",
            [0.5],
            0.5,
        )
        assert (knob["min"], knob["max"], knob["dtype"]) == (0, 1, "float32")
        assert client.post("/api/knobs", json={"name": "damping", "value": 0.25}).json() == {"processes": 1}
        assert client.get("/api/knobs").json()["knobs"][0]["values"] == [0.25]
        for body, status, text in (
            ({"name": "damping", "value": 2}, 502, "is from 0 to 1, got 2"),
            ({"name": "dumping", "value": 0.1}, 502, "no knob is called 'dumping': there are 'damping'"),
            ({"name": "damping"}, 400, "expected the name and the value of a knob"),
        ):
            answer = client.post("/api/knobs", json=body)
            assert (answer.status_code, text in answer.json()["error"]) == (status, True)
        evil = client.post("/api/stop", json={}, headers={"Origin": "http://evil.example"})
        assert evil.status_code == 403
        assert client.post("/api/stop", json={}).json() == {"processes": 1}
        assert process.wait(60) == 0
    shown = hcb_command.hcb(tmp_path, "cat", "log", "--name", "knob/*").stdout.splitlines()
    assert "damping: 0.5 -> 0.25 before read" in shown[-1]
    assert "(hcb ui)" in shown[-1]


def test_the_first_answer_of_a_process_has_its_failures(
    sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostcallback.receiver.ui.server.page_data import PageData

    def fail(value: Any) -> None:
        raise ValueError("planted in this process")

    endpoints.close()
    monkeypatch.setenv("HOSTCALLBACK_CONTROL_DIR", str(sockets))
    monkeypatch.delenv("HOSTCALLBACK_CONTROL_SOCKET", raising=False)
    with hcb.outfeed_receiver(on_error="warn"):
        hcb.jit(lambda x: hcb.id_tap(fail, x, name="unlucky"))(1.0)
        hcb.barrier_wait()
    endpoints.start()
    with (
        closing(endpoints),
        closing(PageData(LogIndex([]), [], live=LiveProcesses([ProcessSource(os.getpid())]))) as page,
    ):
        titles = [group["title"] for group in page.errors()["groups"]]
    assert "ValueError: planted in this process" in titles


def test_rules_need_control_and_a_process(log: Path, serve: Serve) -> None:
    answer = serve(log).post("/api/rules", json={"tap": "*", "enabled": False})
    assert answer.status_code == 403
    assert "--control" in answer.json()["error"]
    assert serve(log).post("/api/knobs", json={"name": "lr", "value": 1}).status_code == 403
    assert serve(log).post("/api/stop", json={}).status_code == 403


def test_a_process_that_does_not_exist_is_an_error_of_the_command() -> None:
    with pytest.raises(HostCallbackError, match="no process 4194305"):
        ProcessSource(4194305)


@pytest.mark.slow
def test_the_processes_of_a_collector_are_shown_and_controlled(sockets: Path, tmp_path: Path) -> None:
    collector = CollectorProcess(tmp_path, "--ui")
    try:
        with (
            running(sockets, "-", collector.address, tmp_path / "spool") as process,
            hcb_ui("--from", collector.address, "--control") as client,
        ):
            found = until(
                lambda: client.get("/api/overview").json(),
                lambda found: any(tap["kind"] == "scalar" and tap["enabled"] for tap in found["taps"]),
            )
            assert [(source["kind"], source["state"]) for source in found["sources"]] == [
                ("collector", "live")
            ]
            answer = client.post(
                "/api/rules", json={"tap": "loss", "run": found["runs"][0]["id"], "enabled": False}
            )
            assert answer.json() == {"applied": ["loss"]}
            until(
                lambda: client.get("/api/overview", params={"filter": "loss"}).json()["taps"],
                lambda taps: taps[0]["enabled"] is False,
            )
            assert client.post("/api/knobs", json={"name": "damping", "value": 0.75}).json() == {
                "processes": 1
            }
            via = ("ctl", "--via", collector.address)
            told = hcb_command.hcb(tmp_path, *via, "set").stdout.splitlines()
            assert [line.split()[:5] for line in told] == [
                ["knob", "value", "default", "min", "max"], ["damping", "0.75", "0.5", "0", "1"],
            ]  # fmt: skip
            assert told[1].split()[-1] == "p0"
            assert (
                '"value": 0.125'
                in hcb_command.hcb(tmp_path, *via, "set", "damping", "0.125", "--json").stdout
            )
            refused = hcb_command.hcb(tmp_path, *via, "set", "dumping", "1")
            assert (refused.returncode, "there are 'damping'" in refused.stderr) == (1, True)
            groups = client.get("/api/errors").json()["groups"]
            (raised,) = [group for group in groups if group["kind"] == "tap exception"]
            assert raised["title"] == "ValueError: a planted\\x1b bug of 0"
            devices = client.get("/api/devices").json()["devices"]
            assert {device["device"]: device["seconds_in_taps"] for device in devices}["cpu:0"] is not None
            stopped = hcb_command.hcb(tmp_path, *via, "stop")
            assert (stopped.returncode, stopped.stdout.startswith("stop requested: ")) == (0, True)
            assert process.wait(60) == 0
        # Its own page has the stored messages, also after the process has ended.
        (told,) = [line for line in collector.errors if "the page is at" in line]
        address, _, token = told.partition("the page is at ")[2].strip().partition("/#token=")
        own = httpx.get(f"{address}/api/overview", headers={"Authorization": f"Bearer {token}"}).json()
        assert any((tap["name"], tap["kind"]) == ("loss", "scalar") for tap in own["taps"])
    finally:
        assert collector.stop() == 0


ANSWER: dict[str, Any] = {
    "time": 1.5,
    "taps": [{"name": "loss", "source_line": "a.py:1", "rules": "", **dict.fromkeys(TAP_NUMBERS, 1)}],
    "devices": [{"device": "cpu:0", **dict.fromkeys(DEVICE_NUMBERS, 0)}],
}


def test_an_answer_with_all_that_the_page_shows_is_taken() -> None:
    assert is_process(ANSWER)


@pytest.mark.parametrize(
    "answer",
    [
        None, "text", [], {}, {**ANSWER, "time": "now"}, {**ANSWER, "time": True}, {**ANSWER, "taps": 3},
        {**ANSWER, "taps": [{**ANSWER["taps"][0], "messages": "1"}]}, {**ANSWER, "taps": [[]]},
        {**ANSWER, "taps": [{**ANSWER["taps"][0], "tap_sec": True}]}, {**ANSWER, "taps": [{"name": "loss"}]},
        {**ANSWER, "taps": [{**ANSWER["taps"][0], "name": 5}]},
        {**ANSWER, "taps": [{**ANSWER["taps"][0], "rules": None}]},
        {**ANSWER, "devices": [{**ANSWER["devices"][0], "device": 0}]}, {**ANSWER, "devices": [{"device": "cpu:0"}]},
        {**ANSWER, "devices": [{**ANSWER["devices"][0], "queued": None}]}, {**ANSWER, "devices": None},
    ],
)  # fmt: skip
def test_a_malformed_answer_is_refused(answer: Any) -> None:
    assert not is_process(answer)
