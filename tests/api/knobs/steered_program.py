"""A training loop that is steered: `steered_program.py LOG at STEP=VALUE ... | replay OTHER_LOG | go`.

With `at`, a host function of the program sets the knob at those steps. With `go` it runs until the knob `go` is 0.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hostcallback as hcb

LOG, WHAT, *REST = sys.argv[1:]
CHANGES = {
    int(step): float(value) for step, _, value in (text.partition("=") for text in REST if "=" in text)
}


def steer(step: Any) -> Any:
    """Changes the knob as the arguments say."""
    if int(step) in CHANGES:
        hcb.knobs["lr"] = CHANGES[int(step)]
    return np.int32(0)


def train(w: Any) -> Any:
    """Ten steps of gradient descent."""

    def step(w: Any, i: Any) -> Any:
        hcb.call(steer, i, result_shape=jax.ShapeDtypeStruct((), jnp.int32))
        w = w - hcb.knob("lr", 0.1, min=0, max=1) * jax.grad(lambda w: (w**2).sum())(w)
        hcb.id_tap(lambda arg: None, {"w": w, "step": i}, name="w")
        return w, None

    return jax.lax.scan(step, w, jnp.arange(10))[0]


def main() -> None:
    """Trains, and prints the bytes of the result."""
    w = jnp.linspace(-1, 1, 5)
    if WHAT == "go":
        hcb.knob("go", True)
        print("ready", flush=True)
        program = jax.jit(lambda x: (x * hcb.knob("lr", 0.1, min=0, max=1), hcb.knob("go", True)))
        while program(1.0)[1]:
            pass
        print(program(1.0)[0], flush=True)
        return
    with hcb.outfeed_receiver(record=LOG):
        if WHAT == "replay":
            print(hcb.knobs.replay(REST[0]))
        print(np.asarray(jax.jit(train)(w)).tobytes().hex())


main()
