"""Programs that read their only result, and return it: XLA:CPU of jaxlib 0.10 compiles them if a call keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import hostcallback as hcb

SIDE = 128  # XLA fuses reductions of arrays from 64 x 64 on


def grid() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "j"))


def on_one_device(f: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(f)(x)


def in_a_call(f: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(lambda x: jax.jit(f)(x))(x)


def simplified_away(f: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(lambda x: f(x) * 1)(x)


def donated(f: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(f, donate_argnums=0)(x + 0)


def divided_by_the_compiler(f: Callable[[Any], Any], x: Any) -> Any:
    return jax.jit(f)(jax.device_put(x, NamedSharding(grid(), PartitionSpec("i", "j"))))


def in_shard_map(f: Callable[[Any], Any], x: Any) -> Any:
    spec = PartitionSpec("i")
    return jax.jit(jax.shard_map(f, mesh=grid(), in_specs=spec, out_specs=spec, check_vma=False))(x)


def in_shard_map_over_one_axis(f: Callable[[Any], Any], x: Any) -> Any:
    spec = PartitionSpec("i")
    shared = jax.shard_map(f, mesh=grid(), in_specs=spec, out_specs=spec, axis_names={"i"}, check_vma=False)
    return jax.jit(shared)(x)


@pytest.mark.parametrize(
    "layout",
    [
        on_one_device,
        in_a_call,
        simplified_away,
        donated,
        divided_by_the_compiler,
        in_shard_map,
        in_shard_map_over_one_axis,
    ],
)
@pytest.mark.parametrize("compute", [lambda w: w * 0.99, lambda w: w @ w.T[:, : w.shape[1]]], ids=["*", "@"])
def test_a_reduction_of_the_only_result_is_tapped(layout: Any, compute: Any) -> None:
    seen: list[float] = []

    def f(w: Any) -> Any:
        w = compute(w) if layout in (on_one_device, in_a_call, simplified_away, donated) else w * 0.99
        hcb.id_tap(lambda norm: seen.append(float(np.ravel(norm)[0])), jnp.linalg.norm(w))
        return w

    x = jnp.ones((SIDE, SIDE)) / SIDE
    out = layout(f, x)
    hcb.barrier_wait()
    assert seen
    whole = compute(x) if layout in (on_one_device, in_a_call, simplified_away, donated) else x * 0.99
    np.testing.assert_allclose(out, whole, rtol=1e-6)
    if layout in (on_one_device, in_a_call, simplified_away, donated, divided_by_the_compiler):
        np.testing.assert_allclose(seen, np.linalg.norm(whole), rtol=1e-5)


def report(way: str, w: Any) -> None:
    mean = jnp.mean(w)
    if way == "print":
        hcb.print("mean {}", mean)
    elif way == "metrics":
        hcb.metrics({"mean": mean}, step=1)
    else:
        hcb.check(mean < 1e9, "too large: {}", mean)


@pytest.mark.parametrize("way", ["print", "metrics", "check"])
def test_a_mean_of_the_only_result_is_reported(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    def f(w: Any) -> Any:
        w = jnp.sin(w) * 2
        report(way, w)
        return w

    with hcb.outfeed_receiver(writers=[], sinks=[lambda message: None]):
        jax.jit(f)(jnp.ones((SIDE, SIDE)))


def test_an_accelerated_program_that_jax_compiles_is_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    def f(w: Any) -> Any:
        w = w * 0.99
        jax.debug.print("norm {}", jnp.linalg.norm(w), ordered=True)
        return w

    with hcb.accelerate():
        jax.jit(f)(jnp.ones((SIDE, SIDE))).block_until_ready()
    hcb.barrier_wait()
    word, norm = capfd.readouterr().out.split()
    assert word == "norm"
    assert float(norm) == pytest.approx(126.72, rel=1e-5)


def test_a_program_whose_tap_takes_the_result_itself_has_no_further_call() -> None:
    def f(w: Any) -> Any:
        w = w * 0.99
        hcb.id_tap(lambda value: None, w)
        return w

    assert jax.jit(f).lower(jnp.ones((4, 4))).as_text().count("custom_call") == 1
