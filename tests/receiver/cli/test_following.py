"""`hcb tail`: the last messages, and with -f new ones, through rotation and from processes that start later."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from test_reading import LOSS, Program, objects

from hcb_command import environment, hcb, start
from hostcallback.receiver.taplog.writing.recorder import record


def emit(program: Program, count: int, **where: Any) -> None:
    for _ in range(count):
        program.emit(LOSS, np.float32(program.seq), np.int32(program.seq), **where)
    program.recorder.flush()


@pytest.mark.parametrize("lines", [0, 1, 7, 5_000])
def test_tail_shows_the_last_messages(tmp_path: Path, lines: int) -> None:
    with record(tmp_path / "log", segment_bytes=20_000) as recorder:
        program = Program(recorder)
        for turn in range(60):
            emit(program, 5, device=f"cpu:{turn % 3}")
    found = objects(hcb(tmp_path, "tail", "--json", "-n", str(lines), "log"))
    assert [item["seq"] for item in found] == list(range(300))[-lines:] if lines else not found
    assert [item["step"] for item in found] == [item["seq"] for item in found]


def test_tail_shows_the_last_chosen_messages(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        for turn in range(60):
            emit(program, 5, device=f"cpu:{turn % 3}")
    found = objects(hcb(tmp_path, "tail", "--json", "-n", "12", "--device", "cpu:1", "--step", ":100", "log"))
    expected = [seq for seq in range(101) if seq // 5 % 3 == 1]
    assert [item["seq"] for item in found] == expected[-12:]


class Following:
    """A running `hcb tail -f --json`, and the messages that it has printed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = start(folder, "tail", "-f", "--json", *arguments)
        self._lines: Queue[str] = Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def take(self, count: int) -> list[int]:
        """The sequence numbers of the next messages."""
        return [json.loads(self._lines.get(timeout=30))["seq"] for _ in range(count)]

    @property
    def is_quiet(self) -> bool:
        return self._lines.empty()


@contextmanager
def following(folder: Path, *arguments: str) -> Iterator[Following]:
    found = Following(folder, *arguments)
    try:
        yield found
        found.process.send_signal(signal.SIGINT)
        assert found.process.wait(20) == 130
    finally:
        found.process.kill()
        found.process.wait()
        found._thread.join(20)
        for stream in (found.process.stdout, found.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.slow
def test_tail_follows_a_log_through_its_segments(tmp_path: Path) -> None:
    with record(tmp_path / "log", segment_bytes=3_000) as recorder:
        program = Program(recorder)
        emit(program, 30)
        with following(tmp_path, "-n", "4", "log") as tail:
            assert tail.take(4) == [26, 27, 28, 29]
            for turn in range(10):
                emit(program, 7)
                assert tail.take(7) == list(range(30 + 7 * turn, 37 + 7 * turn))
            recorder.close()
            emit(program, 3)
            assert tail.take(3) == [100, 101, 102]
            assert tail.is_quiet
    assert len(list((tmp_path / "log").iterdir())) > 5


def test_tail_waits_for_the_first_process_and_follows_later_ones(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with following(tmp_path, "log") as tail:
        for _ in range(3):
            with record(tmp_path / "log") as recorder:
                emit(Program(recorder), 5)
            assert tail.take(5) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_tail_waits_for_the_rest_of_a_half_written_message(tmp_path: Path) -> None:
    with record(tmp_path / "whole") as recorder:
        program = Program(recorder)
        emit(program, 20)
    (path,) = (tmp_path / "whole").iterdir()
    data = path.read_bytes()
    (tmp_path / "log").mkdir()
    growing = tmp_path / "log" / path.name
    growing.write_bytes(data[:30])
    with following(tmp_path, "-n", "20", "log") as tail:  # all, even if it starts when the file is whole
        for end in (100, 1_000, 2_500, 4_000):
            with growing.open("ab") as file:
                file.write(data[growing.stat().st_size : end])
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline:
                assert tail.is_quiet
                threading.Event().wait(0.02)
        with growing.open("ab") as file:
            file.write(data[4_000:])
        assert tail.take(20) == list(range(20))


def test_tail_reports_damage_and_goes_on(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        program = Program(recorder)
        emit(program, 5)
        with following(tmp_path, "log") as tail:
            assert tail.take(5) == [0, 1, 2, 3, 4]
            (path,) = (tmp_path / "log").iterdir()
            with path.open("ab") as file:
                file.write(b"x" * 640)
            recorder._log._segment.nbytes += 640  # type: ignore[union-attr]
            emit(program, 2)
            assert tail.take(2) == [5, 6]
            assert tail.process.stderr is not None
            assert "damaged: no chunk starts here" in tail.process.stderr.readline()


DROPPED = """
import signal, sys, time
from hostcallback.receiver.cli import script
from hostcallback.receiver.cli.commands import tail

class Interrupted:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal's exception ends this function")

class Time:
    turns = 0
    def sleep(self, seconds):
        self.turns += 1
        if self.turns < 3:
            Interrupted()
        time.sleep(seconds)

tail.time = Time()
sys.argv = ["hcb", "tail", "-f", "log"]
script()
"""


def test_an_interrupt_that_python_drops_is_repeated(tmp_path: Path) -> None:
    with record(tmp_path / "log") as recorder:
        emit(Program(recorder), 3)
    command = [sys.executable, "-c", DROPPED]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (130, "")
    assert len(result.stdout.splitlines()) == 3
