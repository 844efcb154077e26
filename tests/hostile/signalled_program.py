"""A process that forks one process for each order it reads: these emit numbers until a signal ends them.

An order is a line of JSON: `folder`, `option` and `moment`. The answer is the process id. The line `{"wait": pid}` is
answered with the status of that process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb

BURST = 200
SLOW_SEC = 0.02


def options(option: str, folder: Path) -> dict[str, Any]:
    """Arguments of the receiver."""
    spool = hcb.Forward("localhost:1", spool=folder / "spool", drain_sec=0.1)
    return {
        "record": {"record": folder / "log"},
        "forward": {"forward": spool},
        "flight": {"flight_recorder": folder / "flight"},
    }[option]


def emit(folder: Path, option: str, moment: str) -> None:
    """Emits, and tells in files how far it is; waits for the signal where the moment wants it."""
    pause = threading.Event()
    is_slow = moment in ("slow", "closing")

    def tap(value: Any) -> None:
        if is_slow:
            pause.wait(SLOW_SEC)

    def step(number: Any, _: None) -> tuple[Any, None]:
        hcb.id_tap(tap, number, name="number")
        return number + 1, None

    burst = jax.jit(lambda number: lax.scan(step, number, None, BURST)[0]).lower(jnp.int32(0)).compile()
    done = os.open(folder / "done", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with hcb.outfeed_receiver(timeout_sec=60, **options(option, folder)):
        number = np.int32(0)
        if moment == "before":
            (folder / "now").touch()
            pause.wait(60)
        while True:
            number = burst(number).block_until_ready()
            os.write(done, b"%d\n" % int(number))
            if moment == "burst":
                (folder / "now").touch()
            elif is_slow:
                break
        if moment == "slow":
            for _ in range(30):  # on a busy machine longer, as long as 30 turns of a thread take there
                pause.wait(0.01)
            (folder / "now").touch()
            pause.wait(60)
        (folder / "now").touch()


def become(order: dict[str, str]) -> None:
    """Turns this fork into the process of an order."""
    folder = Path(order["folder"])
    out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(null, 0)
    emit(folder, order["option"], order["moment"])
    sys.exit(0)


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            become(order)
        print(pid, flush=True)
