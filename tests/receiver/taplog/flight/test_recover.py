"""Programs that die with a flight recorder: the messages that `hcb recover` finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.flight.recorder import RingFileError, read_ring
from hostcallback.receiver.taplog.flight.recovery import find_flights
from python_process import run_python

pytestmark = [pytest.mark.native_only, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("flying_program.py")
STEPS = 20


def fly(
    how: str, directory: Path, *, by_argument: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program; it records into `directory`."""
    recorder = {} if by_argument else {"HOSTCALLBACK_FLIGHT_RECORDER": str(directory)}
    return run_python(PROGRAM, how, *([str(directory)] if by_argument else []), **recorder, **env)


def recovered(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """Output of `hcb recover --json`."""
    assert main(["recover", str(directory), "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("by_argument", [False, True], ids=["environment", "argument"])
@pytest.mark.parametrize(
    ("how", "ended"),
    [("kill", signal.SIGKILL), ("abort", signal.SIGABRT), ("segfault", signal.SIGSEGV)],
)
def test_every_message_of_a_process_that_died(
    how: str, ended: int, by_argument: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fly(how, tmp_path, by_argument=by_argument)
    assert done.returncode == -ended, done.stderr
    messages = recovered(tmp_path, capsys)
    states = [m for m in messages if m["name"] == "state"]
    assert [m["value"]["step"] for m in states] == list(range(STEPS))
    assert [m["value"]["x"] for m in states] == [[float(i)] * 3 for i in range(STEPS)]
    assert {m["device"] for m in messages} == {"cpu:0"}
    assert states[0]["kwargs"] == {"note": "from the program"}
    assert "flying_program.py:" in states[0]["source_line"]
    # 256 KiB each, outside the ring. Messages emitted before the ring moved into the file may be missing.
    big = [m for m in messages if m["name"] == "big"]
    if not by_argument:
        assert [m["value"][63][1023] for m in big] == list(range(STEPS))
    assert [m["seq"] for m in messages] == sorted(m["seq"] for m in messages)
    # The tap function was stuck in its third message, behind which everything waits.
    delivered = [m for m in states if m["delivered"]]
    assert len(delivered) <= 3
    assert delivered == states[: len(delivered)]
    only = recovered(tmp_path, capsys, "--undelivered", "--name", "state")
    assert only == [m for m in states if not m["delivered"]]
    assert [m["step"] for m in only] == [m["step"] for m in states if not m["delivered"]]


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_process_that_ends_as_it_should_leaves_nothing(how: str, tmp_path: Path) -> None:
    done = fly(how, tmp_path)
    assert done.returncode == (how == "raise")
    assert list(tmp_path.iterdir()) == []
    assert main(["recover", str(tmp_path)]) == 1


def test_a_forked_child_does_not_write_into_its_parents_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fly("fork", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    messages = recovered(tmp_path, capsys)
    assert [m["value"]["step"] for m in messages if m["name"] == "state"] == list(range(STEPS))
    assert len(messages) == 2 * STEPS


def test_the_readable_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fly("kill", tmp_path)
    assert main(["recover", str(tmp_path), "--name", "state", "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "flying_program.py kill (started 20" in lines[0]
    assert lines[1].startswith("  cpu:0: ")
    assert "undelivered" in lines[1]
    assert [line.endswith("not delivered") for line in lines[-2:]] == [True, True]
    assert "step: 19" in lines[-1]
    assert main(["recover", str(tmp_path), "--to", str(tmp_path / "log")]) == 0
    capsys.readouterr()
    assert main(["cat", str(tmp_path / "log"), "--name", "state", "--step", "7"]) == 0
    assert "step: 7" in capsys.readouterr().out


def test_one_launch_of_a_flight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fly("kill", tmp_path)
    messages = recovered(tmp_path, capsys)
    last = messages[-1]["launch"]
    assert recovered(tmp_path, capsys, "--launch", last) == [m for m in messages if m["launch"] == last]
    unknown = next(name for name in ("000001", "000002") if name not in {m["launch"] for m in messages})
    assert main(["recover", str(tmp_path), "--launch", unknown]) == 1
    assert f"the log has no messages of a launch {unknown}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = fly("exit", file)
    assert done.returncode == 0
    assert "no flight is recorded" in done.stderr
    done = fly("exit", file, by_argument=True)
    assert done.returncode == 1
    assert "FileExistsError" in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system_does_not_end_the_run(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        done = fly("exit", small)
        assert done.returncode == 0, done.stderr
        assert "the file system is full" in done.stderr
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_the_callback_transport_warns_that_it_keeps_no_messages(tmp_path: Path) -> None:
    done = fly("exit", tmp_path, HOSTCALLBACK_TRANSPORT="callback")
    assert done.returncode == 0, done.stderr
    assert "it needs the native transport" in done.stderr


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fly("kill", tmp_path)
    (flight,) = find_flights(tmp_path)
    ring = flight.rings[0].path
    good = ring.read_bytes()
    for bad, said in [
        (b"", "is not the file of a ring"),
        (b"foreign" * 100, "is not the file of a ring"),
        (good[:8] + b"\x02" + good[9:], "version 2"),
        (good[: 1 << 20], "it was truncated"),
    ]:
        ring.write_bytes(bad)
        with pytest.raises(RingFileError, match=said):
            read_ring(ring)
        assert main(["recover", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err
    # Overwritten memory: the good frames are found, and the rest is reported.
    page = 4096
    broken = bytearray(good)
    header = flight.rings[0].frames[5].header
    at = page + header.position % (8 << 20)
    broken[at : at + 64] = bytes(np.arange(64, dtype=np.uint8))
    ring.write_bytes(broken)
    contents = read_ring(ring)
    assert contents.damaged == [(header.position, header.position + header.frame_bytes)]
    assert len(contents.frames) == len(flight.rings[0].frames) - 1
    assert main(["recover", str(tmp_path / "nothing")]) == 1
