"""One process that emits for as long as the test takes: `python -m tools.soak.steady MESSAGES SECONDS FOLDER`.

It changes between the policies of back-pressure, checks every value and every count, and prints a line of JSON after
each round. What it holds in memory must not grow.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

import hostcallback as hcb
from tools.bench.machine import resident_mib

ROUND = 100_000
SLOW_EVERY = 4000
POLICIES = ("block", "block", "drop_newest", "block", "sample", "overwrite_oldest")


class Values:
    """A tap function that checks that the values ascend, and counts them. It is slow now and then."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.count, self.last, self.faults = 0, -1, 0
        self.is_slow = False
        self._pause = threading.Event()

    def __call__(self, value: Any) -> None:
        number = int(value)
        self.faults += number <= self.last
        self.last = number
        self.count += 1
        if self.is_slow and not self.count % SLOW_EVERY:
            self._pause.wait(0.02)


VALUES = Values()


@jax.jit
def burst(number: Any) -> Any:
    """Emits `ROUND` numbers."""

    def step(number: Any, _: None) -> tuple[Any, None]:
        hcb.id_tap(VALUES, number, name="steady")
        return number + 1, None

    return lax.scan(step, number, None, ROUND)[0]


def run_round(policy: str, folder: Path, number: int) -> dict[str, Any]:
    """Emits once; returns the counts, and what is wrong with them."""
    VALUES.is_slow = policy != "block"
    VALUES.last = -1
    before = VALUES.count
    record = folder / "steady" if number % 5 == 0 else None
    with hcb.outfeed_receiver(back_pressure=policy, record=record) as receiver:
        burst(np.int32(0)).block_until_ready()
    (row,) = receiver.stats
    delivered = VALUES.count - before
    faults = []
    if row.delivered != delivered or row.delivered + row.dropped != ROUND:
        faults.append(
            f"{policy}: {delivered} came, {row.delivered} and {row.dropped} were counted of {ROUND}"
        )
    if policy == "block" and row.dropped:
        faults.append(f"{row.dropped} messages were dropped though the policy is to wait")
    if VALUES.faults:
        faults.append(f"{policy}: {VALUES.faults} values came out of order")
        VALUES.faults = 0
    for path in (folder / "steady").glob("*.hcblog"):
        path.unlink()
    return {"emitted": ROUND, "delivered": row.delivered, "dropped": row.dropped, "faults": faults}


def usage() -> dict[str, int]:
    """Memory in KiB, open files and threads of this process."""
    return {
        "rss_kib": int(1024 * resident_mib()),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def main(messages: int, seconds: float, folder: Path) -> None:
    """Spreads the messages over the time."""
    began, emitted, pause = time.monotonic(), 0, threading.Event()
    for number in itertools.count():
        if emitted >= messages:
            return
        line = run_round(POLICIES[number % len(POLICIES)], folder, number)
        emitted += ROUND
        print(json.dumps({**line, **usage()}), flush=True)
        pause.wait(max(0.0, began + seconds * emitted / messages - time.monotonic()))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
