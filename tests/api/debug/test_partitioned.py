"""`partitioned=True` under vmap: each device brings its shards of each element, as with `jax.debug`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb

X = jnp.arange(16.0).reshape(4, 4)
Y = 100 + X
SPECS = [P(), P("d"), P(None, "d"), P("d", "m"), P("m", "d"), P(None, ("d", "m"))]

Emit = Callable[..., None]
Program = Callable[..., Any]


def put(x: Any, spec: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("d", "m"))
    return jax.device_put(x, NamedSharding(mesh, spec))


def received(callback: Callable[..., Any], program: Program, *args: Any) -> list[Any]:
    """The values that reach the host, in some order; the devices define none."""
    lock = threading.Lock()
    got: list[Any] = []

    def keep(*values: Any) -> None:
        with lock:
            got.append([np.asarray(value).tolist() for value in values])

    jax.jit(lambda *args: program(lambda *values: callback(keep, *values), *args))(*args)
    jax.effects_barrier()
    hcb.barrier_wait()
    return sorted(got)


def ours(keep: Any, *values: Any) -> None:
    hcb.callback(partitioned=True)(keep, *values)


def jaxs(keep: Any, *values: Any) -> None:
    jax.debug.callback(keep, *values, partitioned=True)


def alike(program: Program, *args: Any) -> list[Any]:
    found = received(ours, program, *args)
    assert found == received(jaxs, program, *args)
    return found


def mapped(*in_axes: Any) -> Program:
    """A program that emits its arguments under vmap."""

    def program(emit: Emit, *args: Any) -> Any:
        jax.vmap(emit, in_axes)(*args)
        return args

    return program


@pytest.mark.slow_variants(every=6)
@pytest.mark.parametrize(("x", "y"), [*itertools.product(SPECS, SPECS)])
def test_operands_batched_along_different_axes(x: P, y: P) -> None:
    assert len(alike(mapped(0, 1), put(X, x), put(Y, y))) == 16


@pytest.mark.parametrize("spec", SPECS)
def test_one_operand_batched_and_one_not(spec: P) -> None:
    assert len(alike(mapped(None, 1), put(X[0], P("d")), put(Y, spec))) == 16


@pytest.mark.parametrize("spec", SPECS)
def test_vmap_of_vmap(spec: P) -> None:
    def program(emit: Emit, x: Any, y: Any) -> Any:
        jax.vmap(jax.vmap(emit, in_axes=(0, None)), in_axes=(1, 0))(x, y)
        return x

    assert len(alike(program, put(X, spec), put(Y, P("m")))) == 64


def test_every_device_gets_every_element_in_order() -> None:
    devices: dict[Any, list[Any]] = {device: [] for device in jax.devices()}
    mapping = jax.vmap(lambda x: hcb.callback(partitioned=True)(lambda x: None, x))
    with hcb.outfeed_receiver(sinks=[lambda message: devices[message.device].append(message.arrays[0])]):
        jax.jit(lambda x: (mapping(x), x)[1])(put(X, P("d", "m")))
    assert [[a.tolist() for a in arrays] for arrays in devices.values()] == [
        [X[:, half].tolist()] for half in 2 * (slice(0, 2), slice(2, 4))
    ]


def test_in_a_scan_and_of_computed_values() -> None:
    def program(emit: Emit, x: Any) -> Any:
        return lax.scan(lambda c, x: (c, (jax.vmap(lambda x: emit(x.sum(), x * 2))(x), x)[1]), 0, x)[1]

    assert len(alike(program, put(X.reshape(2, 2, 4), P(None, "d", "m")))) == 16


def test_prints_match_jax(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(print_: Any) -> list[str]:
        def program(x: Any, y: Any) -> Any:
            jax.vmap(lambda x, y: print_("x {} y {y}", x, y=y), in_axes=(0, 1))(x, y)
            return x

        jax.jit(program)(put(X, P("m", "d")), put(Y, P("d", "m")))
        jax.effects_barrier()
        hcb.barrier_wait()
        return sorted(capsys.readouterr().out.splitlines())

    def jax_print(fmt: str, *args: Any, **kwargs: Any) -> None:
        jax.debug.print(fmt, *args, **kwargs, partitioned=True)

    assert printed(hcb.print(partitioned=True)) == printed(jax_print)


def test_nothing_else_moves_a_shard() -> None:
    def text(tap: Any) -> str:
        return jax.jit(lambda x: (jax.vmap(tap)(x), x)[1]).lower(put(X, P("d", "m"))).compile().as_text()

    def ignore(x: Any) -> None:
        pass

    assert "all-gather" in text(lambda x: hcb.callback(partitioned=True)(ignore, x))
    assert "all-gather" not in text(lambda x: hcb.callback(ignore, x))
    assert "all-gather" not in text(lambda x: hcb.id_tap(ignore, x, sharding="local"))
    alone = jax.jit(lambda x: (hcb.callback(partitioned=True)(ignore, x), x)[1])
    assert "all-gather" not in alone.lower(put(X, P("d", "m"))).compile().as_text()
