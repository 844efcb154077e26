"""A run of several JAX processes that are killed and started again, and the messages a collector must then have."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collecting import WAIT_SEC, wait_for
from hostcallback.receiver.errors import CutOffLogError, NotATapLogError
from hostcallback.receiver.taplog.format.layout import Damage
from hostcallback.receiver.taplog.reading.merge import LostNote
from hostcallback.receiver.taplog.reading.reader import LogReader
from ports import free_port

PROGRAM = Path(__file__).with_name("stepping_program.py")
PER_STEP = 3
"""Messages per step of each process."""

LATE_SEC = 2.0
"""Messages older than this when their process is killed must be in its spool: 20 ms by the documents, and the rest for
overloaded machines.
"""

START_SEC = 110.0
_CONFIRMED = struct.Struct("<qq")


@dataclass(slots=True)
class Life:
    """One process, from its start to its end.

    Attributes:
        number: of the process in the program.
        process: it.
        confirmed: the file it writes to when a step is done.
        spool: its folder.
        killed_ns: when the first of the program's processes was killed; 0 for none.
    """

    number: int
    process: subprocess.Popen[bytes]
    confirmed: Path
    spool: Path
    killed_ns: int = 0

    def steps(self, until_ns: int = sys.maxsize) -> int:
        """How many steps were done by then, by its own account."""
        return sum(at <= until_ns for at in self._times())

    def missing_ms(self, messages: int) -> int:
        """Age at the kill of the first step that is not stored, if the collector has stored this many messages."""
        missing = [at for at in self._times()[messages // PER_STEP :] if at <= self.killed_ns]
        return (self.killed_ns - missing[0]) // 1_000_000 if missing else 0

    def _times(self) -> list[int]:
        data = self.confirmed.read_bytes() if self.confirmed.exists() else b""
        whole = data[: len(data) // _CONFIRMED.size * _CONFIRMED.size]
        return [at for _, at in _CONFIRMED.iter_unpack(whole)]


@dataclass(slots=True)
class TrainingRun:
    """The program, started again and again.

    Attributes:
        folder: of its files.
        collector: the address of its collector.
        count: of its processes.
        shares_spool: whether these have one folder, as on one host, or one each, as on several.
        program: what they run.
        lives: all processes, including ended ones.
    """

    folder: Path
    collector: str
    count: int
    shares_spool: bool
    program: Path = PROGRAM
    lives: list[Life] = field(default_factory=list)

    @property
    def living(self) -> list[Life]:
        """The processes of the last start."""
        return self.lives[-self.count :]

    def start(self, steps: int, seed: int = 0, **variables: str) -> None:
        """Starts it once more, with these variables in its environment."""
        port, place = str(free_port()), len(self.lives)
        environment = {**os.environ, **variables, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        for number in range(self.count):
            spool = self.folder / ("spool" if self.shares_spool else f"spool{number}")
            confirmed = self.folder / f"confirmed{place + number}"
            arguments = (number, self.count, port, self.collector, spool, confirmed, steps, seed)
            with (self.folder / f"errors{place + number}").open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, self.program, *map(str, arguments)], env=environment,
                    stdout=subprocess.DEVNULL, stderr=errors,
                )  # fmt: skip
            self.lives.append(Life(number, process, confirmed, spool))

    def wait_for_steps(self, steps: int) -> None:
        """Waits until all processes have completed this many steps."""

        def are_done() -> bool:
            for life in self.living:
                assert life.process.poll() is None, self._errors(life)
            return all(life.steps() >= steps for life in self.living)

        wait_for(are_done, f"{steps} steps of each process", START_SEC)

    def kill(self, numbers: Sequence[int]) -> None:
        """Kills some of the processes that were started last."""
        now = time.monotonic_ns()
        for life in self.living:
            life.killed_ns = life.killed_ns or now
        for number in numbers:
            self.living[number].process.kill()

    def wait_for_end(self) -> list[int]:
        """Until all have ended by themselves, or were killed; their statuses."""
        return [life.process.wait(START_SEC) for life in self.living]

    def end(self) -> None:
        """Kills the remaining processes."""
        for life in self.lives:
            life.process.kill()
            life.process.wait(WAIT_SEC)

    def check_ended_well(self) -> None:
        """Waits for processes that were not killed."""
        assert self.wait_for_end() == [0] * self.count, [self._errors(life) for life in self.living]

    def _errors(self, life: Life) -> str:
        place = self.lives.index(life)
        return (self.folder / f"errors{place}").read_text(errors="replace")[-4_000:]

    def spooled(self) -> dict[int, set[int]]:
        """The numbers of messages that are in spools, by process id."""
        found: dict[int, set[int]] = {}
        for segment in self.folder.glob("spool*/*~*/*.hcblog"):
            for pid, messages in messages_in(segment, self.count).items():
                found.setdefault(pid, set()).update(messages)
        return found

    def spools_are_empty(self) -> bool:
        """Whether all is sent."""
        return not any(self.folder.glob("spool*/*~*"))


def messages_in(log: Path, count: int) -> dict[int, list[int]]:
    """The numbers of the messages of a log, in its order, by process id; checks the sums over this many processes."""
    found: dict[int, list[int]] = {}
    try:
        reader = LogReader(log)
    except (CutOffLogError, NotATapLogError, FileNotFoundError):
        return found
    for record in reader.records():
        assert not isinstance(record, LostNote), record
        if isinstance(record, Damage):
            assert record.torn, record
            continue
        message = record.message
        found.setdefault(record.writer.pid, []).append(message.seq)
        assert record.step == message.seq, record
        value = {name: int(np.squeeze(array)) for name, array in record.value.items()}
        assert value == {"step": message.seq, "total": sum(range(count)) + count * message.seq}
    return found
