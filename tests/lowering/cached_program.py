"""Runs tapped programs with a persistent compilation cache: `python cached_program.py FOLDER`.

Prints the tap messages, the digest of each program's text, and how often the cache was hit and missed.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb

events: Counter[str] = Counter()


def count(event: str, **kwargs: Any) -> None:
    if "compilation_cache" in event:
        events[event.rpartition("/")[2]] += 1


def show(arg: Any, **kwargs: Any) -> None:
    print("tap", arg.tolist(), kwargs)


class Shower:
    """A tap function that only its identity tells from others of its kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, arg: Any) -> None:
        print("tap", self.name, arg.tolist())


def step(x: Any) -> Any:
    first, second = Shower("first"), Shower("second")

    def body(c: Any, i: Any) -> Any:
        hcb.id_tap(show, c, kind="step", of=(1, "a"))
        hcb.id_print(c.sum(), what="sum")
        hcb.id_tap(first, c)
        hcb.id_tap(second, c * 2)
        return c + 1, None

    x, _ = lax.scan(body, x, jnp.arange(2))
    grads = jax.grad(lambda v: (hcb.id_tap(show, v) ** 2).sum())(x)
    hcb.print("grads {g}", g=grads)
    return grads


jax.monitoring.register_event_listener(count)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

one = jnp.arange(4.0)
four = jax.device_put(one, NamedSharding(Mesh(jax.devices(), ("i",)), P("i")))
f = jax.jit(step)
for x in (one, four):
    print("text", hashlib.sha256(f.lower(x).as_text().encode()).hexdigest())
    events.clear()
    out = np.asarray(f(x))
    print("cache", "hits", events["cache_hits"], "misses", events["cache_misses"], file=sys.stderr)
    hcb.barrier_wait()
    print("out", out.tolist())
