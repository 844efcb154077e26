"""Signals at several moments, with each option: what is recorded, spooled and kept is what the documents promise.

All cases fork from one process, which has imported JAX.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkout import python_path
from collecting import wait_for
from hostcallback.receiver.errors import CutOffLogError
from hostcallback.receiver.taplog.flight.recovery import find_flights
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.logged_message import LoggedMessage
from hostcallback.receiver.taplog.reading.reader import LogReader
from python_process import start_python

pytestmark = pytest.mark.native_only

PROGRAM = Path(__file__).with_name("signalled_program.py")
BURST = 200
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
MOMENTS = ["before", "burst", "slow", "closing"]
OPTIONS = ["record", "forward", "flight"]
FAST = {
    (signal.SIGTERM, "burst", "record"),
    (signal.SIGKILL, "burst", "flight"),
}
CASES = [
    pytest.param(
        *case, marks=() if case in FAST else pytest.mark.slow, id=f"{case[0].name}-{case[1]}-{case[2]}"
    )
    for case in ((number, moment, option) for number in SIGNALS for moment in MOMENTS for option in OPTIONS)
]


FLIGHT_HOLDS = 20_000
"""A flight recording (8 MiB) holds more of these messages before it overwrites the first."""


class Parent:
    """The process that forks the others."""

    def __init__(self) -> None:
        environment = {"PYTHONPATH": python_path(), "HOSTCALLBACK_CONTROL_SOCKET": "0"}
        self._process = start_python("-W", "ignore", PROGRAM, stdin=subprocess.PIPE, **environment)
        assert self._answer() == "ready"

    def start(self, folder: Path, option: str, moment: str) -> int:
        """Starts a process; returns its id."""
        return int(self._ask({"folder": str(folder), "option": option, "moment": moment}))

    def wait(self, pid: int) -> int:
        """Waits for the end of a process; returns its status."""
        return int(self._ask({"wait": pid}))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate(timeout=60)

    def _ask(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    found = Parent()
    yield found
    found.close()


def in_log(folder: Path) -> list[int]:
    """The numbers in the log or spool below a folder, in its order."""
    try:
        reader = LogReader(sorted(folder.rglob("*.hcblog")))
        records = list(reader.records())
    except (CutOffLogError, FileNotFoundError):
        return []
    except Exception as error:
        if "no tap log was given" in str(error):
            return []
        raise
    assert all(record.torn for record in records if isinstance(record, Damage)), records
    return [_value(record) for record in records if isinstance(record, LoggedMessage)]


def _value(record: LoggedMessage) -> int:
    return int(record.message.arrays[0])


def in_flight(folder: Path) -> list[int]:
    """The numbers in the rings that a flight recorder kept."""
    if not list(folder.rglob("*.hcbring")):
        return []
    frames = [
        frame.frame for flight in find_flights(folder) for ring in flight.rings for frame in ring.frames
    ]
    return [int.from_bytes(frame[-64:][:4], "little", signed=True) for frame in frames]


@pytest.mark.slow_variants
@pytest.mark.parametrize(("number", "moment", "option"), CASES)
def test_a_signal(number: signal.Signals, moment: str, option: str, tmp_path: Path, parent: Parent) -> None:
    pid = parent.start(tmp_path, option, moment)
    wait_for(lambda: (tmp_path / "now").exists() or _is_over(pid), "the moment of the signal")
    before, was_over = _done(tmp_path), _is_over(pid)
    os.kill(pid, number)
    status = parent.wait(pid)
    text = (tmp_path / "out").read_text(errors="replace")
    kept = in_flight(tmp_path / "flight") if option == "flight" else in_log(tmp_path)
    after = _done(tmp_path)
    # At SIGTERM messages are delivered and sent first. A program that is closing its receiver may end meanwhile, and on
    # a very busy machine before the signal.
    has_ended = moment == "closing" and (number is signal.SIGTERM or was_over) and status == 0
    assert status == -number or has_ended, text
    assert "Fatal" not in text
    if option == "flight" and (has_ended or (number is signal.SIGINT and moment in ("before", "burst"))):
        assert not kept, "a process that has delivered everything removes its flight recording"
        return
    # A flight recording has the last messages only, if the signal came so late that more were emitted than it holds.
    overwritten = kept[0] if option == "flight" and len(kept) > FLIGHT_HOLDS else 0
    kept = [*range(overwritten), *kept]
    assert kept == list(range(len(kept))), "each once, in order, without a gap"
    assert len(kept) <= after + BURST
    if moment == "before":
        assert not kept
    elif moment == "slow" or option == "flight" or number is not signal.SIGKILL:
        # Everything that was emitted before the signal. SIGHUP ends a process at once, like SIGKILL.
        is_at_once = number is signal.SIGHUP and moment != "slow" and option in ("record", "forward")
        assert len(kept) >= (0 if is_at_once else before), text
    if moment == "slow" and number is signal.SIGINT:
        assert "not delivered" in text, text


def _done(folder: Path) -> int:
    path = folder / "done"
    lines = path.read_text().split() if path.exists() else []
    return int(lines[-1]) if lines else 0


def _is_over(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " in status.read_text()
