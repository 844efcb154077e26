"""A process for other processes to control: runs taps until its standard input ends, and prints the messages.

python controlled_program.py [PACE_SEC [COLLECTOR SPOOL [CA]]]
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import jax.numpy as jnp
from jax import lax

import hostcallback as hcb

arrived: dict[str, int] = {"layer1/grad": 0, "loss": 0}
sizes: set[int] = set()


def count(value: Any, name: str) -> None:
    """The tap function of all taps."""
    arrived[name] += 1
    sizes.add(value.size)


def program(x: Any) -> Any:
    """Ten steps of two taps and a check."""

    def step(carry: Any, _: Any) -> Any:
        hcb.id_tap(lambda v: count(v, "layer1/grad"), carry, name="layer1/grad")
        hcb.id_tap(lambda v: count(v, "loss"), carry.sum(), name="loss")
        hcb.check(carry.sum() >= 0, "negative", name="sign")
        return carry + 1, None

    return lax.scan(step, x, None, length=10)[0]


def main() -> None:
    """Runs the program again and again; answers a line on standard input with the messages that have arrived so far."""
    pace = float(sys.argv[1]) if len(sys.argv) > 1 else 0.002
    if len(sys.argv) > 2:
        forward = hcb.Forward(
            sys.argv[2], spool=sys.argv[3], tls_ca=sys.argv[4] if len(sys.argv) > 4 else None
        )
        with hcb.outfeed_receiver(forward=forward):
            go_on(pace)
    else:
        go_on(pace)


def go_on(pace: float) -> None:
    """Until the standard input ends."""
    ended = threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            print({**arrived, "sizes": sorted(sizes)}, flush=True)
        ended.set()

    run = hcb.jit(program)
    run(jnp.zeros(100))
    hcb.barrier_wait()
    print("ready", flush=True)
    threading.Thread(target=listen, daemon=True).start()
    while not ended.wait(pace):
        run(jnp.zeros(100))
        hcb.barrier_wait()


if __name__ == "__main__":
    main()
