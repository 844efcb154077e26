"""Tapped programs lower for platforms that have no native handler, and that this machine does not have."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb

JITS = [pytest.param(jax.jit, id="jax.jit"), pytest.param(hcb.jit, id="hcb.jit")]


def tapped(x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        return hcb.id_tap(print, c + 1), None

    x = lax.scan(step, x, None, length=3)[0]
    hcb.id_print(x, what="unused")
    return lax.cond(x.sum() > 0, lambda x: hcb.id_tap(print, (x, 1)), lambda x: (x, 2), x)


@pytest.mark.parametrize("jit", JITS)
def test_a_tapped_program_lowers_for_tpu(jit: Any) -> None:
    text = jit(tapped).trace(jnp.ones(4)).lower(lowering_platforms=("tpu",)).as_text()
    # A TPU program sends to its host what XLA's FFI calls pass elsewhere: three taps, the last of two arrays.
    sent = re.findall(r"stablehlo.send.*is_host_transfer = true", text)
    # Each callback also gets the number of the device that calls it.
    assert len(sent) == 2 + 2 + 3
    assert "hostcallback_tap" not in text


@pytest.mark.parametrize("jit", JITS)
def test_grad_and_vmap_of_a_tapped_program_lower_for_tpu(jit: Any) -> None:
    f = jax.vmap(jax.grad(lambda x: hcb.id_tap(print, x) ** 2))
    text = jit(f).trace(jnp.ones(4)).lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r"stablehlo.send", text)) == 2 * 2


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_tapped_program_lowers_for_gpus(platform: str) -> None:
    text = jax.jit(tapped).trace(jnp.ones(4)).lower(lowering_platforms=(platform,)).as_text()
    assert len(re.findall(r"custom_call @xla_ffi_python_gpu_callback", text)) == 3


def test_several_platforms_at_once_are_refused_with_the_line_and_the_cure() -> None:
    with pytest.raises(
        NotImplementedError, match=r"test_other_platforms.py:\d+ .* cpu, tpu: .*one at a time"
    ):
        jax.jit(tapped).trace(jnp.ones(4)).lower(lowering_platforms=("cpu", "tpu"))


def test_automatic_sharding_on_tpu_is_refused_with_the_line_and_the_cure() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    with pytest.raises(
        NotImplementedError, match=r"test_other_platforms.py:\d+ .* over 4 devices.*jax.shard_map"
    ):
        jax.jit(lambda x: hcb.id_tap(print, x)).trace(x).lower(lowering_platforms=("tpu",))
