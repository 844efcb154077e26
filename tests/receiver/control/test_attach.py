"""`hcb attach`: a running program's output in another terminal, and the way back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from hostcallback.receiver import wire
from hostcallback.receiver.cli import main
from hostcallback.receiver.taplog.reading.reader import LogReader

pytestmark = pytest.mark.native_only

PROGRAM = Path(__file__).with_name("attached_program.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(wire.__file__).parents[3]), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """The program, after its begin."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.before = until(process.stdout, "ready")  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def rest_of(client: subprocess.Popen[str]) -> tuple[str, str]:
    """The rest of its output, to the end, and its errors."""
    # Not communicate: lines that were read ahead would be missing.
    assert client.stdout is not None
    assert client.stderr is not None
    with client.stdout, client.stderr:
        found = client.stdout.read(), client.stderr.read()
    client.wait(60)
    return found


def until(stream: IO[str], word: str) -> list[str]:
    """The lines up to the first that begins with a word."""
    found = []
    for line in stream:
        found.append(line.rstrip("\n"))
        if line.startswith(word):
            break
    return found


def attach(program: subprocess.Popen[str], *options: str) -> subprocess.Popen[str]:
    """`hcb attach`, once it shows something."""
    return subprocess.Popen(
        [sys.executable, "-m", "hostcallback.receiver.cli", "attach", str(program.pid), *options],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def numbers(lines: list[str]) -> list[int]:
    """Of the lines that the taps print."""
    return [int(line.split()[1]) for line in lines if line.startswith("line ")]


@pytest.mark.slow
def test_a_terminal_takes_over_and_gives_back(program: subprocess.Popen[str], tmp_path: Path) -> None:
    client = attach(program, "--record", str(tmp_path))
    assert client.stdout is not None
    shown = until(client.stdout, "line ")
    shown += [client.stdout.readline() for _ in range(20)]
    client.send_signal(signal.SIGINT)
    rest, said = rest_of(client)
    assert client.returncode == 0, said
    assert "Ctrl-C detaches" in said
    there = numbers([*shown, *rest.splitlines()])
    assert program.stdin is not None
    program.stdin.close()
    assert program.stdout is not None
    here = until(program.stdout, "count")
    count = int(here[-1].split()[1])
    # Each line once, here or there, in order; the program's own goes on where the terminal's ended.
    assert there == list(range(there[0], there[0] + len(there)))
    assert len(there) > 20
    assert sorted([*numbers(program.before), *numbers(here), *there]) == list(range(count))  # type: ignore[attr-defined]
    # Checks stay with the program.
    assert f"raised {count - 10}" in here
    assert [int(m.message.arrays[0]) for m in LogReader([tmp_path]).messages()] == there


@pytest.mark.slow
def test_a_killed_terminal_leaves_everything_to_the_program(program: subprocess.Popen[str]) -> None:
    client = attach(program)
    assert client.stdout is not None
    shown = [line for line in until(client.stdout, "line ") if line.startswith("line ")]
    client.kill()
    rest, _ = rest_of(client)
    whole = rest[: rest.rfind("\n") + 1]  # it may have been killed within a line
    there = numbers([*shown, *whole.splitlines()])
    assert program.stdin is not None
    program.stdin.close()
    assert program.stdout is not None
    here = until(program.stdout, "count")
    count = int(here[-1].split()[1])
    # Its last output may appear once more.
    assert set(numbers([*program.before, *here])) | set(there) == set(range(count))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_terminal_outlives_a_killed_program(program: subprocess.Popen[str]) -> None:
    client = attach(program)
    assert client.stdout is not None
    shown = until(client.stdout, "line ")
    program.kill()
    rest, said = rest_of(client)
    assert client.returncode == 0, said
    assert f"process {program.pid} has ended" in said
    there = numbers([*shown, *rest.splitlines()])
    assert there == list(range(there[0], there[0] + len(there)))


@pytest.mark.slow
def test_two_terminals_are_one_too_many(program: subprocess.Popen[str]) -> None:
    first = attach(program)
    assert first.stdout is not None
    until(first.stdout, "line ")
    second = attach(program)
    _, said = rest_of(second)
    assert second.returncode == 1
    assert "one reads them already" in said
    first.send_signal(signal.SIGINT)
    rest_of(first)


def test_no_such_process(capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert main(["attach", str(gone.pid)]) == 1
    assert f"no process {gone.pid} exists" in capsys.readouterr().err
