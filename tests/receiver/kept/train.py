"""The program that writes the kept files; tools/make_kept_files.py runs it: `train.py record LOG | die SPOOL FLIGHTS`.

`record` ends normally. `die` kills itself: it leaves a spool that no collector has, and a flight recording.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb

STEPS = 3


class State(NamedTuple):
    """A container of the program's own."""

    loss: Any
    grads: Any


def nothing(*args: Any, **kwargs: Any) -> None:
    """A tap function."""


@hcb.jit
def train(x: jax.Array) -> jax.Array:
    """Prints, scalars, containers, and a check that fails in the last step."""

    def body(x: Any, i: Any) -> tuple[Any, None]:
        hcb.print("step {step}: x is {x:.2f}, twice {0!r:>5}", 2 * x, step=i, x=x)
        hcb.id_tap(nothing, {"step": i, "loss": x, "accuracy": x / 8}, name="metrics")
        hcb.id_tap(nothing, State(x, {"w": x * jnp.arange(6.0).reshape(2, 3)}), name="state", run=7)
        hcb.check(x < STEPS, "x is {}", x)
        return x + 1, None

    return lax.scan(body, x, jnp.arange(STEPS))[0]


@hcb.jit
def leaves(y: jax.Array) -> jax.Array:
    """Leaves of every sort, in one message."""
    value = {
        "bf16": jnp.array([1.5, jnp.nan], jnp.bfloat16),
        "int4": jnp.array([[1, -2]], jnp.int4),
        "f8": jnp.ones((3,), jnp.float8_e4m3fn),
        "complex": jnp.array([1 + 2j, 0], jnp.complex64),
        "key": jax.random.key(3),
        "yes": jnp.array(True),
        "big": jnp.array([2**32 - 1], jnp.uint32),
        "empty": jnp.zeros((0, 2)),
        "text": "a text",
        "none": None,
    }
    hcb.id_tap(nothing, (value, y), name="leaves")
    return hcb.id_print(y, what="y", name="shown")


def transformed() -> None:
    """Taps under vmap and grad, of a sharded value, and of a truncated one."""
    jax.vmap(hcb.jit(lambda z: hcb.id_tap(nothing, 2 * z, name="batched")))(jnp.arange(3.0))
    jax.grad(hcb.jit(lambda z: hcb.id_tap(nothing, z, name="primal") ** 2))(3.0)
    spec = jax.sharding.PartitionSpec("x")
    halves = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), spec))
    hcb.jit(lambda v: hcb.id_tap(nothing, v, name="sharded"))(halves)
    hcb.jit(lambda v: hcb.id_tap(nothing, v, name="everywhere", processes="all"))(jnp.float32(5))
    hcb.jit(lambda v: hcb.id_tap(nothing, v, name="long"))(jnp.arange(64.0))
    hcb.taps["long"].truncate(4)
    hcb.jit(lambda v: hcb.id_tap(nothing, v, name="long"))(jnp.arange(64.0))


def emit() -> None:
    """Emits and waits; the check fails."""
    train(jnp.float32(1))
    leaves(jnp.float32(7))
    transformed()
    with contextlib.suppress(hcb.TapFunctionException):
        hcb.barrier_wait()


def record(log: str) -> None:
    """A tap log, in which a loss is noted."""
    with hcb.record(log) as recorder:
        with hcb.outfeed_receiver(record=recorder):
            emit()
        recorder.lose("cpu:0", 3, "dropped: no room")


def die(spool: str, flights: str) -> None:
    """A spool and a flight recording of a process that was killed."""
    to_nobody = hcb.forward("localhost:1", spool=spool, run="kept")
    with hcb.outfeed_receiver(forward=to_nobody, flight_recorder=flights) as rx:
        emit()
        assert rx.forwarder is not None
        rx.forwarder.lose("cpu:0", 3, "dropped: no room")
        rx.forwarder.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    {"record": record, "die": die}[sys.argv[1]](*sys.argv[2:])
