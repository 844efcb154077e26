"""A reader gets the messages that a process had written before it was killed, at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from checkout import python_path
from hostcallback.receiver.taplog.reading.reader import LogReader
from logged_frames import LOSS, read, seqs
from python_process import start_python

PROGRAM = Path(__file__).with_name("logging_program.py")


def start_program(folder: Path, compress: bool) -> subprocess.Popen[str]:
    return start_python(PROGRAM, folder, str(int(compress)), PYTHONPATH=python_path())


def kill_at_random(folder: Path, compress: bool, rng: random.Random) -> dict[int, int]:
    """Starts the program, kills it, and returns the number of messages of each device it reported as written."""
    process = start_program(folder, compress)
    assert process.stdout is not None
    written: dict[int, int] = {}
    lines = rng.randrange(1, 400)
    for line in process.stdout:
        device, seq = map(int, line.split())
        written[device] = seq
        lines -= 1
        if not lines:
            # In the middle of the next message.
            os.kill(process.pid, signal.SIGKILL)
            break
    rest = process.stdout.read()
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n") and len(line.split()) == 2:
            device, seq = map(int, line.split())
            written[device] = seq
    process.stdout.close()
    process.wait()
    return written


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "zstd"])
@pytest.mark.slow
def test_nothing_that_was_written_is_lost_by_a_kill(tmp_path: Path, compress: bool) -> None:
    rng = random.Random(5)
    for number in range(16):
        folder = tmp_path / f"{number}"
        written = kill_at_random(folder, compress, rng)
        messages, lost, damaged = read(folder)
        assert lost == []
        assert all(damage.torn for damage in damaged), damaged
        for device, count in written.items():
            own = [m for m in messages if m.message.device == f"cpu:{device}"]
            assert seqs(own) == list(range(len(own))), (number, device)
            assert len(own) >= count, (number, device)
        for message in messages:
            if message.tap.described == LOSS:
                assert message.value == {"loss": message.message.seq, "step": message.message.seq}
            else:
                assert message.value.shape == (3_000,)
                assert np.all((message.value >= 0) & (message.value < 1))


@pytest.mark.slow
def test_several_processes_write_into_one_folder(tmp_path: Path) -> None:
    processes = [start_program(tmp_path, compress=False) for _ in range(3)]
    written: list[dict[int, int]] = []
    for process in processes:
        assert process.stdout is not None
        own: dict[int, int] = {}
        for line in process.stdout:
            device, seq = map(int, line.split())
            own[device] = seq
            if len(own) == 3 and min(own.values()) > 1_000:
                break
        written.append(own)
    for process in processes:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()
    reader = LogReader(tmp_path)
    assert {writer.pid for writer in reader.writers} == {process.pid for process in processes}
    for process, own in zip(processes, written, strict=True):
        for device, count in own.items():
            found = [
                m.message.seq
                for m in reader.messages()
                if m.writer.pid == process.pid and m.message.device == f"cpu:{device}"
            ]
            assert found == list(range(len(found)))
            assert len(found) >= count
