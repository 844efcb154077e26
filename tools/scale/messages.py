"""Many messages in one process: all come once, in order, and memory does not grow."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.sources.ring_batch import RingConfig
from tools.bench.machine import resident_mib

ROUND = 1_000_000
MOST = 1 << 31
BOUND_MIB = RingConfig().capacity_bytes / 2**20 + 30
"""Growth of resident memory that is allowed, from the level after the first rounds to the highest one."""


class Numbers:
    """A tap function of stacks of numbers: 0, 1, 2 and so on must come. It counts and adds them as integers."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.count = self.total = self.out_of_order = 0

    def __call__(self, stack: Any) -> None:
        expected = np.arange(self.count, self.count + len(stack), dtype=np.int64)
        self.out_of_order += int((stack != expected).sum())
        self.count += len(stack)
        self.total += int(stack.sum(dtype=np.int64))


@dataclass(slots=True)
class Found:
    """What one run has found.

    Attributes:
        count: messages that were emitted.
        numbers: what came.
        dropped: messages that the receiver counted as dropped.
        seconds: from the first emission to the last delivery.
        processor_sec: of the process meanwhile.
        resident_mib: resident memory after each round.
    """

    count: int
    numbers: Numbers
    dropped: int = 0
    seconds: float = 0.0
    processor_sec: float = 0.0
    resident_mib: list[float] = field(default_factory=list)

    @property
    def start_mib(self) -> float:
        """Resident memory after the first fiftieth of the rounds, when all that a run needs was used once."""
        return self.resident_mib[len(self.resident_mib) // 50]

    def faults(self) -> list[str]:
        """What is wrong."""
        numbers, total = self.numbers, self.count * (self.count - 1) // 2
        growth = max(self.resident_mib) - self.start_mib
        checks = [
            (numbers.count == self.count, f"{numbers.count:,} messages came, expected {self.count:,}"),
            (numbers.total == total, f"their sum is {numbers.total:,}, expected {total:,}"),
            (not numbers.out_of_order, f"{numbers.out_of_order:,} messages came out of order"),
            (not self.dropped, f"{self.dropped:,} messages were dropped"),
            (growth <= BOUND_MIB, f"memory grew by {growth:.1f} MiB, expected at most {BOUND_MIB:.0f} MiB"),
        ]
        return [text for holds, text in checks if not holds]

    def table(self) -> str:
        """The result as a table."""
        middle = self.resident_mib[len(self.resident_mib) // 2]
        rows = [
            ("messages: int32 scalars of one `lax.scan`, delivered in stacks", f"{self.count:,}"),
            ("came, each number once and in order", f"{self.numbers.count:,}"),
            ("their sum, of integers", f"{self.numbers.total:,}"),
            ("time", f"{self.seconds:.0f} s, {self.seconds / self.count * 1e6:.3f} us a message"),
            ("processor time of the process", f"{self.processor_sec / self.count * 1e6:.3f} us a message"),
            ("resident memory at the start", f"{self.start_mib:.1f} MiB"),
            ("in the middle", f"{middle:.1f} MiB"),
            ("at the end", f"{self.resident_mib[-1]:.1f} MiB"),
            ("the highest of all rounds", f"{max(self.resident_mib):.1f} MiB"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


def run(count: int) -> Found:
    """Emits the numbers below `count` from a jitted loop, and has them delivered in stacks.

    Raises:
        ValueError: `count` is not a number of whole rounds, or too large for int32.
    """
    steps = min(ROUND, count)
    if not 0 < count < MOST or count % steps:
        raise ValueError(f"the count is {count:,}, expected a multiple of {ROUND:,} below {MOST:,}")
    found = Found(count, Numbers())

    @jax.jit
    def emit(first: Any) -> Any:
        def step(number: Any, _: None) -> tuple[Any, None]:
            return hcb.id_tap(found.numbers, number, batched=True, name="number") + 1, None

        return lax.scan(step, first, None, length=steps)[0]

    began, used = time.perf_counter(), time.process_time()
    number: Any = np.int32(0)
    with hcb.outfeed_receiver() as receiver:
        for done in range(steps, count + 1, steps):
            number = emit(number)
            number.block_until_ready()
            if done == count:
                hcb.barrier_wait()
            found.resident_mib.append(resident_mib())
        found.dropped = sum(row.dropped for row in receiver.stats)
    found.seconds, found.processor_sec = time.perf_counter() - began, time.process_time() - used
    return found
