"""Timing for the benchmarks: calls until their result is ready, and programs until their messages are delivered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import hostcallback as hcb


class Counter:
    """The Python function that both sides deliver to."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.count = 0

    def __call__(self, value: Any) -> None:
        """Counts one message."""
        self.count += 1


class Gate(Counter):
    """A tap function that can be held: its receiver then delivers nothing, without the interpreter lock."""

    def __init__(self) -> None:
        """Open."""
        super().__init__()
        self._open, self._held = threading.Event(), threading.Event()
        self._open.set()
        self._enter = jax.jit(lambda x: hcb.id_tap(self, x) + 1)

    def __call__(self, value: Any) -> None:
        """Counts one message, when the gate is open."""
        self.count += 1
        if not self._open.is_set():
            self._held.set()
            self._open.wait()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Sends one message and, when the receiver is held with it, lets other things be done; then delivers all."""
        self._open.clear()
        self._held.clear()
        self._enter(jnp.float32(0)).block_until_ready()
        self._held.wait()
        try:
            yield
        finally:
            self._open.set()
            hcb.barrier_wait()


def seconds(program: Callable[[], Any]) -> float:
    """Until the result is there, delivered or not."""
    start = perf_counter()
    jax.block_until_ready(program())
    return perf_counter() - start


def delivered_us(program: Callable[[], Any], barrier: Callable[[], None], count: int) -> float:
    """Microseconds a message from the call until the last of `count` messages was delivered."""
    start = perf_counter()
    jax.block_until_ready(program())
    barrier()
    return (perf_counter() - start) / count * 1e6


def scan(jit: Any, tap: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
    """A jitted scan that changes its carry, an array or a tree of them, and taps it in every step."""

    def step(carry: Any, _: Any) -> Any:
        carry = jax.tree.map(lambda leaf: leaf * 1.0001, carry)
        tap(carry)
        return carry, None

    compiled: Callable[[Any], Any] = jit(lambda x: lax.scan(step, x, None, length=steps)[0])
    return compiled
