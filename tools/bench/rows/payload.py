"""The benchmarks of large arrays, which the tap function keeps, compared with a copy of the same bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from tools.bench.handlers import Copies
from tools.bench.row import Row, measure
from tools.bench.rows.scan import beside_debug_callback
from tools.bench.timing import Counter, delivered_us, scan

KIB, MIB = 2**10, 2**20


def kept(rounds: int) -> list[Row]:
    """Arrays of 256 KiB, 16 MiB and 256 MiB, delivered to a tap function that keeps them, against one memcpy.

    Ours is a scan that taps the same array in every step, from the call until the last one was delivered. The peer
    copies the same array as often with `ndarray.copy`, page faults included (numpy asks for huge pages from 4 MiB on).
    Both sides keep every array until the clock stops, so that each array has separate memory, and free them then.
    """
    sizes = ((256 * KIB, 200, rounds), (16 * MIB, 16, rounds), (256 * MIB, 2, min(rounds, 7)))
    return [_kept(nbytes, steps, count) for nbytes, steps, count in sizes]


def _kept(nbytes: int, steps: int, rounds: int) -> Row:
    x = jnp.arange(nbytes // 4, dtype=jnp.float32)
    source = np.asarray(x)
    hold: deque[Any] = deque()

    @jax.jit
    def program(x: Any, start: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            hcb.id_tap(hold.append, x)
            return carry + 1, None

        return lax.scan(step, start, None, length=steps)[0]

    def timed(run: Callable[[], None]) -> float:
        start = perf_counter()
        run()
        elapsed = perf_counter() - start
        assert len(hold) == steps
        assert hold[-1][-1] == source[-1]
        hold.clear()
        return elapsed / steps * 1e6

    def ours() -> None:
        program(x, jnp.float32(0)).block_until_ready()
        hcb.barrier_wait()

    def copies() -> None:
        for _ in range(steps):
            hold.append(source.copy())

    mine, peer = measure([lambda: timed(ours), lambda: timed(copies)], rounds)
    size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
    name = f"array of {size} in a scan, delivered, the tap keeps it"
    return mine.versus(peer, name, "us/message", "one memcpy into fresh memory", 1.5)


def beside_callback(rounds: int) -> list[Row]:
    """An array of 256 KiB that every step of a scan changes and taps; the tap function keeps none of them.

    The floor is an FFI call that copies the array to one of two places, and a Python thread that makes an array of it
    and gives it to the function: nothing is ordered, named or bounded.
    """
    x, steps = jnp.ones(64 * KIB, jnp.float32), 400
    least = Counter()
    copies = Copies(x, least, slots=2)
    floor = scan(jax.jit, copies, steps)

    def run_floor() -> float:
        copies.begin(steps)
        return delivered_us(lambda: floor(x), copies.wait, steps)

    name = "array of 256 KiB in a scan, changed and delivered"
    mine, peer, bare = beside_debug_callback(x, steps, steps, rounds, run_floor)
    assert least.count == steps * (rounds + 1)
    floor_name = "an FFI call that copies, and a thread that makes arrays"
    callback = "jax.debug.callback(ordered=True)"
    return [
        mine.versus(peer, name, "us/message", callback, 1 / 5),
        mine.versus(bare, "the same", "us/message", floor_name, None),
        bare.versus(peer, f"{floor_name}: 256 KiB in a scan", "us/message", callback, None),
    ]
