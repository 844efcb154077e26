"""A program that taps until its input ends or it has to stop: `python live_program.py LOG [COLLECTOR SPOOL]`.

With `failing` in place of a collector, each step fails a check.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp

import hostcallback as hcb

FAILING = sys.argv[2:] == ["failing"]


@jax.jit
def step(number: Any) -> Any:
    """Sends a loss, a number whose tap function raises at first, and fails a check once."""
    hcb.id_tap(lambda value: None, {"step": number, "loss": 1.0 / (1.0 + number)}, name="loss")
    hcb.id_tap(fail_once, {"step": number}, name="unlucky")
    hcb.check(number != 2, "two came: {n}", n=number)
    if FAILING:
        hcb.check(number < 0, "never", name="always")
    hcb.knob("damping", 0.5, min=0, max=1)
    return number + 1


def fail_once(found: Any) -> None:
    """A tap function with a bug."""
    if found["step"] < 2:
        raise ValueError(f"a planted\x1b bug of {found['step']}")


def main() -> None:
    """Steps every few milliseconds."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    log, *collector = sys.argv[1 : 2 if FAILING else None]
    options: dict[str, Any] = {"forward": hcb.Forward(collector[0], spool=collector[1])} if collector else {}
    if log != "-":
        options["record"] = log
    number = jnp.int32(0)
    with hcb.outfeed_receiver(on_error="warn", **options):
        number = step(number).block_until_ready()
        print("ready", flush=True)
        while not ended.wait(0.005) and not hcb.stop_requested():
            number = step(number)


if __name__ == "__main__":
    main()
