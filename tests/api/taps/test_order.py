"""Taps of one device arrive in program order, in programs that XLA:CPU would run out of order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder

# XLA:CPU runs programs of at most 8 thunks or of buffers up to 512 bytes sequentially, which would hide disorder.
SITES = 40
SIDE = 64


def many_taps(rec: Recorder, x: Any) -> Any:
    """Independent branches of work, each tapped; no data flows from one to the next."""
    branches = []
    for i in range(SITES):
        y = jnp.dot(x, x) if i % 3 else x  # unequal work, so that running ahead would show
        branches.append(hcb.id_tap(rec, y + i, site=i))
    return sum(branches)


def test_independent_taps_keep_program_order(rec: Recorder) -> None:
    f = jax.jit(lambda x: many_taps(rec, x))
    x = jnp.ones((SIDE, SIDE))
    for _ in range(10):
        f(x)
    hcb.barrier_wait()
    assert [k["site"] for k in rec.kwargs] == list(range(SITES)) * 10


def test_order_holds_across_control_flow_and_nested_functions(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(rec, x, site="before")

        def body(c: Any, i: Any) -> Any:
            hcb.id_tap(rec, c @ c, site="first")
            c = lax.cond(i % 2 == 0, lambda c: hcb.id_tap(rec, c, site="even"), lambda c: c, c)
            jax.jit(lambda c: hcb.id_tap(rec, c, site="nested"))(c)
            return c, None

        x, _ = lax.scan(body, x, jnp.arange(3))
        return hcb.id_tap(rec, x, site="after")

    f = jax.jit(f)
    for _ in range(5):
        f(jnp.ones((SIDE, SIDE)))
    hcb.barrier_wait()
    expected = ["before", "first", "even", "nested", "first", "nested", "first", "even", "nested", "after"]
    assert [k["site"] for k in rec.kwargs] == expected * 5


def test_executions_of_one_thread_keep_their_order(rec: Recorder) -> None:
    f = jax.jit(lambda x, i: hcb.id_tap(rec, (x @ x, i))[0] * 0 + 1)
    x = jnp.ones((SIDE, SIDE))
    for i in range(200):
        x = f(x, i)
    hcb.barrier_wait()
    assert [int(i) for _, i in rec.values] == list(range(200))


def test_every_device_of_a_shard_map_keeps_its_own_order(rec: Recorder) -> None:
    mesh = Mesh(jax.devices(), ("i",))

    def per_device(x: Any) -> Any:
        return many_taps(rec, x)

    spec = PartitionSpec("i")
    f = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))
    x = jnp.ones((SIDE * len(jax.devices()), SIDE))
    for _ in range(5):
        f(x)
    hcb.barrier_wait()
    for device in jax.devices():
        sites = [k["site"] for k, d in zip(rec.kwargs, rec.devices, strict=True) if d == device]
        assert sites == list(range(SITES)) * 5


def test_unordered_taps_all_arrive(rec: Recorder) -> None:
    f = jax.jit(lambda x: sum(hcb.id_tap(rec, x @ x + i, ordered=False, site=i) for i in range(SITES)))
    f(jnp.ones((SIDE, SIDE)))
    hcb.barrier_wait()
    assert sorted(k["site"] for k in rec.kwargs) == list(range(SITES))
