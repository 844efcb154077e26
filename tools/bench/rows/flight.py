"""The benchmarks of the flight recorder: rings in files compared with anonymous ones."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hostcallback as hcb
from hostcallback.receiver.runtime.runtime import runtime
from hostcallback.receiver.taplog.flight.recorder import BLOCK_BYTES
from tools.bench.row import Row, measure
from tools.bench.separate_process import rows_of_process
from tools.bench.timing import seconds

ELEMENTS, ARRAYS = 1 << 16, 500
"""Of the arrays of 256 KiB."""

FEW = 8
"""Blocks that an anonymous ring uses again and again."""


def ring_in_file(rounds: int) -> list[Row]:
    """Taps in a scan, delivered, on a device whose ring is in a file and on one with an anonymous ring.

    The floor of arrays is numpy's copies of an array that changes, into a file of the size of the recorder's, whose
    parts take turns, so that the file has what came last; and into a few blocks, such as an anonymous ring uses again.
    """
    return rows_of_process(__name__, "ring_in_file_here", rounds, devices=2)


def ring_in_file_here(rounds: int) -> list[Row]:
    """See `ring_in_file`. Both devices belong to one process, and take turns."""
    plain, kept = jax.local_devices()
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None

    def scan(count: int) -> Callable[[Any], Any]:
        def step(carry: Any, i: Any) -> Any:
            return hcb.id_tap(lambda value: None, carry + i), None

        return jax.jit(lambda x: lax.scan(step, x, jnp.arange(count, dtype=jnp.float32))[0])

    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as directory, hcb.outfeed_receiver():
        source: Any = runtime.receivers([f"cpu:{kept.id}"])[0].source
        source.keep_in_file(Path(directory) / "kept.hcbring", "cpu:1", BLOCK_BYTES)
        for name, shape, count in (("scalar", (), 100_000), ("array of 256 KiB", (ELEMENTS,), ARRAYS)):
            run = scan(count)

            def side(
                device: Any, run: Any = run, shape: Any = shape, count: int = count
            ) -> Callable[[], float]:
                x = jax.device_put(jnp.zeros(shape), device)

                def once() -> float:
                    def delivered() -> None:
                        run(x).block_until_ready()
                        hcb.barrier_wait()

                    return seconds(delivered) / count * 1e6

                once()
                return once

            sides = [side(kept), side(plain)]
            if shape:
                parts = (BLOCK_BYTES // 4 // ELEMENTS, ELEMENTS)
                file = np.memmap(Path(directory) / "floor", np.float32, "w+", shape=parts)
                sides += [_copies(file), _copies(np.zeros((FEW, ELEMENTS), np.float32))]
            ours, peer, *floors = measure(sides, rounds)
            title = f"{name} in a scan, delivered: the ring in a file (flight recorder)"
            rows.append(ours.versus(peer, title, "us/message", "an anonymous ring", 1.1))
            if floors:
                copied, few = floors
                rows.append(ours.versus(copied, "the same", "us/message", "numpy's copies into a file", None))
                title = "numpy's copies of arrays of 256 KiB into a file"
                rows.append(copied.versus(few, title, "us/message", "into eight blocks of memory", None))
    return rows


def _copies(memory: Any) -> Callable[[], float]:
    """Copies an array that changes to each row of the memory in turn; what is written first is paged in."""
    x, rows = np.zeros(ELEMENTS, np.float32), itertools.cycle(memory)
    memory[:] = 0

    def once() -> float:
        start = perf_counter()
        for row in itertools.islice(rows, ARRAYS):
            np.add(x, 1, out=x)
            np.copyto(row, x)
        return (perf_counter() - start) / ARRAYS * 1e6

    return once
