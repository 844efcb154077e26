"""Rules of taps whose arrays are shards: a value is sent by all devices or by none, also while rules change."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb
from recorder import Recorder


def sharded(x: Any) -> Any:
    return jax.device_put(x, NamedSharding(Mesh(jax.devices(), ("i",)), PartitionSpec("i")))


def test_every_nth_value_is_sent_over_all_launches(rec: Recorder) -> None:
    program = jax.jit(lambda x: hcb.id_tap(rec, x, name=f"nth value {jax.jit.__module__}") + 1)
    hcb.taps["nth value*"].every(3)
    for start in range(8):
        program(sharded(jnp.arange(8.0) + 100 * start))
    hcb.barrier_wait()
    assert [value.tolist() for value in rec.values] == [[100 * n + k for k in range(8)] for n in (0, 3, 6)]
    assert hcb.taps[f"nth value {jax.jit.__module__}"].suppressed == {f"nth value {jax.jit.__module__}": 5}


def test_a_rate_holds_for_values(rec: Recorder) -> None:
    def step(carry: Any, _: Any) -> Any:
        return hcb.id_tap(rec, carry, name="rated value") + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=50)[0])
    hcb.taps["rated value"].rate(1 / 3600)
    program(sharded(jnp.arange(8.0)))
    hcb.barrier_wait()
    assert [value.tolist() for value in rec.values] == [list(range(8))]


def test_no_value_stays_incomplete_while_rules_change(rec: Recorder) -> None:
    done = threading.Event()

    def step(carry: Any, _: Any) -> Any:
        return hcb.id_tap(rec, carry, name="ruled meanwhile") + 1, None

    program = hcb.jit(lambda x: lax.scan(step, x, None, length=200)[0])
    program(sharded(jnp.zeros(8)))

    def change() -> None:
        selection = hcb.taps["ruled meanwhile"]
        for turn in itertools.cycle(range(6)):
            if done.is_set():
                return
            if turn == 0:
                selection.disable()
            elif turn == 1:
                selection.enable()
            elif turn == 4:
                selection.reset()
            else:
                selection.every(turn)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(30):
            program(sharded(jnp.zeros(8)))
        hcb.barrier_wait()  # raises IncompleteValueError if a value was sent by some devices only
    finally:
        done.set()
        changing.join()
    assert len(rec) < 200 * 31
    assert all(np.ptp(value) == 0 for value in rec.values)
