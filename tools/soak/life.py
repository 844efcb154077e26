"""Starts processes that emit until they are killed: `python -m tools.soak.life`, told by lines of JSON.

The processes are forks of this one, which has imported JAX, so that each costs a fraction of a second. A line has the
fields of `Order`; the answer is a line with the process id. The line `{"wait": pid}` is answered with its status.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple


class Order(NamedTuple):
    """What one process does.

    Attributes:
        folder: of its files: `log`, `flight`, `out`; `started` when it begins to emit.
        collector: address of the collector.
        spool: folder of the spools.
        run: name of its run.
        slow_sec: seconds that its tap function takes.
        seed: of its pauses.
        messages: after which it ends by itself; 0 for none.
        linger_sec: how long it then waits for the collector.
    """

    folder: str
    collector: str
    spool: str
    run: str
    slow_sec: float
    seed: int
    messages: int = 0
    linger_sec: float = 0.0


def emit(order: Order) -> None:
    """Emits numbers from 0 on, in bursts, until the process is killed."""
    import jax
    import numpy as np
    from jax import lax

    import hostcallback as hcb

    pause = threading.Event()
    chance = random.Random(order.seed)

    def tap(value: Any) -> None:
        if order.slow_sec:
            pause.wait(order.slow_sec)

    def step(number: Any, _: None) -> tuple[Any, None]:
        hcb.id_tap(tap, number, name="number")
        return number + 1, None

    def burst(number: Any, count: int) -> Any:
        return lax.scan(step, number, None, count)[0]

    bursts = [1, 50, 1000, 5000]
    compiled = {
        count: jax.jit(burst, static_argnums=1).lower(np.int32(0), count).compile() for count in bursts
    }
    folder = Path(order.folder)
    forward = hcb.Forward(order.collector, spool=order.spool, run=order.run, drain_sec=order.linger_sec)
    with hcb.outfeed_receiver(record=folder / "log", forward=forward, flight_recorder=folder / "flight"):
        (folder / "started").touch()
        number, total = np.int32(0), 0
        while not order.messages or total < order.messages:
            count = chance.choice(bursts)
            number = compiled[count](number)
            total += count
            pause.wait(chance.choice([0.0, 0.0, 0.001, 0.05]))


def main() -> None:
    """Reads orders until the input ends."""
    import jax
    import jax.numpy  # noqa: F401

    import hostcallback

    assert hostcallback.outfeed_receiver
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        found = json.loads(line)
        if "wait" in found:
            _, status = os.waitpid(found["wait"], 0)
            print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        order = Order(**found)
        pid = os.fork()
        if not pid:
            _become(order)
        print(json.dumps({"pid": pid}), flush=True)


def _become(order: Order) -> None:
    out = os.open(Path(order.folder) / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(null, 0)
    emit(order)
    sys.exit(0)


if __name__ == "__main__":
    main()
