"""`hcb top` from another process: once, as JSON, on a terminal, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collecting import forwarder
from controlled import ROOT, Controlled, controlled
from hostcallback.receiver.cli import main
from hostcallback.receiver.remote.collector.access import Access, Limits
from hostcallback.receiver.remote.collector.service import Collector, CollectorServer
from hostcallback.receiver.remote.collector.store import Store
from hostcallback.receiver.remote.control.relay import ControlService
from threads import wait_for


def test_a_table_of_devices_and_taps(process: Controlled) -> None:
    done = process.hcb("top", process.pid, "--once", "--interval", 0.5)
    assert (done.returncode, done.stderr) == (0, "")
    (head,), (devices, device, *_), (taps, *rows) = [part.splitlines() for part in done.stdout.split("\n\n")]
    assert head.startswith(f"process {process.pid} on ")
    assert devices.split() == [
        "device",
        "messages",
        "bytes",
        "queue",
        "queued",
        "waiting",
        "dropped",
        "running",
    ]
    assert device.startswith("cpu:0")
    assert taps.split() == ["tap", "messages", "bytes", "time", "errors", "suppressed", "rules", "line"]
    assert {row.split()[0] for row in rows} == {"layer1/grad", "loss", "sign"}
    (grad,) = [row for row in rows if row.startswith("layer1/grad")]
    assert int(grad.split()[1].removesuffix("/s").replace(",", "")) > 0


@pytest.mark.slow
def test_json_of_several_intervals(process: Controlled) -> None:
    line = [
        sys.executable,
        "-m",
        "hostcallback.receiver.cli",
        "top",
        str(process.pid),
        "--json",
        "--interval",
        "0.2",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=process.environment, cwd=ROOT) as top:
        assert top.stdout is not None
        found = [json.loads(top.stdout.readline()) for _ in range(3)]
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 130
    for shown in found:
        taps = {tap["name"]: tap for tap in shown["taps"]}
        assert taps["loss"]["messages_per_sec"] > 0
        assert taps["loss"]["bytes_per_sec"] == pytest.approx(4 * taps["loss"]["messages_per_sec"])
        assert taps["layer1/grad"]["bytes_per_sec"] == pytest.approx(
            400 * taps["layer1/grad"]["messages_per_sec"]
        )
        assert 0 <= taps["loss"]["busy"] < 1
        assert shown["seconds"] == pytest.approx(0.2, abs=5)
        assert (shown["devices"][0]["dropped"], taps["loss"]["failed"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("with_rich", [True, False])
def test_on_a_terminal_it_goes_on_until_it_is_interrupted(process: Controlled, with_rich: bool) -> None:
    if with_rich:
        pytest.importorskip("rich")
    hide = "" if with_rich else "sys.modules['rich.console'] = None; "
    program = f"import sys; {hide}from hostcallback.receiver.cli import main; sys.exit(main())"
    terminal, screen = pty.openpty()
    environment = {**process.environment, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    line = [sys.executable, "-c", program, "top", str(process.pid), "--interval", "0.1"]
    top = subprocess.Popen(line, stdin=screen, stdout=screen, stderr=screen, env=environment, cwd=ROOT)
    os.close(screen)
    text = b""
    deadline = time.monotonic() + 30
    while text.count(b"layer1/grad") < 3:
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.5)[0]:
            text += os.read(terminal, 1 << 16)
    top.send_signal(signal.SIGINT)
    while True:
        try:
            more = os.read(terminal, 1 << 16)
        except OSError:
            break
        if not more:
            break
        text += more
    os.close(terminal)
    assert top.wait(30) == 130
    assert b"Traceback" not in text
    if with_rich:
        assert b"\x1b[?1049h" in text
        assert text.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in text, "the terminal is as it was"
    else:
        assert b"pip install 'hostcallback[top]'" in text


@pytest.mark.slow
def test_the_process_may_end_meanwhile(process: Controlled, tmp_path_factory: pytest.TempPathFactory) -> None:
    with controlled(tmp_path_factory.mktemp("others")) as other:
        line = [
            sys.executable,
            "-m",
            "hostcallback.receiver.cli",
            "top",
            str(other.pid),
            "--json",
            "--interval",
            "0.1",
        ]
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=other.environment, cwd=ROOT
        ) as top:
            assert top.stdout is not None
            assert top.stderr is not None
            top.stdout.readline()
            other.kill()
            assert top.wait(30) == 1
            assert top.stderr.read().startswith(f"hcb: process {other.pid} is gone")


@pytest.mark.parametrize("interval", ["0", "-1", "soon"])
def test_intervals_that_make_no_sense(process: Controlled, interval: str) -> None:
    done = process.hcb("top", process.pid, f"--interval={interval}")
    assert done.returncode == 2
    assert "expected seconds, 0.05 to 3600" in done.stderr


def test_no_such_process(process: Controlled) -> None:
    done = process.hcb("top", 99999999, "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hcb: no process 99999999 exists")


@contextmanager
def collector(folder: Path) -> Iterator[str]:
    """The address of a collector in this process."""
    store = Store(folder)
    control = ControlService(store.directory, access=Access(), limits=Limits())
    server = CollectorServer(Collector(store), "localhost:0", handlers=(control.handlers(),))
    listens = threading.Event()
    thread = threading.Thread(target=server.serve, args=(listens.set,))
    thread.start()
    try:
        assert listens.wait(30)
        yield server.where.removeprefix("at ")
    finally:
        server.end()
        thread.join()
        store.close()


def test_a_process_of_a_collector_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def processes() -> list[list[str]]:
        assert main(["top", "--via", address, "--once", "--interval", "0.05"]) == 0
        head, table, _ = capsys.readouterr().out.split("\n\n")
        heads.append(head)
        return [line.split() for line in table.splitlines()[1:]]

    heads: list[str] = []

    with collector(tmp_path / "log") as address:
        with forwarder(address, tmp_path / "spool", run="exp", process_index=3):
            (row,) = wait_for(processes, "the process")
        assert heads[-1] == "1 process(es)"
        assert row[:2] == ["exp", "p3"]
        assert row[3] == str(os.getpid())
