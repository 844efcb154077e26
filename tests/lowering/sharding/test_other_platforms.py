"""Tapped programs lower for platforms that have no native handler, and that this machine does not have."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback.lifecycle import receivers as transport


def tapped(x: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        return hcb.id_tap(print, c + 1), None

    x = lax.scan(step, x, None, length=3)[0]
    hcb.id_print(x, what="unused")
    return lax.cond(x.sum() > 0, lambda x: hcb.id_tap(print, (x, 1)), lambda x: (x, 2), x)


def test_a_tapped_program_lowers_for_tpu() -> None:
    text = jax.jit(tapped).trace(jnp.ones(4)).lower(lowering_platforms=("tpu",)).as_text()
    # A TPU program sends to its host the arguments of XLA's FFI calls elsewhere: three taps, the last of two arrays.
    sent = re.findall(r"stablehlo.send.*is_host_transfer = true", text)
    # Each callback also gets the number of the calling device.
    assert len(sent) == 2 + 2 + 3
    assert "hostcallback_tap" not in text


def test_grad_and_vmap_of_a_tapped_program_lower_for_tpu() -> None:
    f = jax.vmap(jax.grad(lambda x: hcb.id_tap(print, x) ** 2))
    text = jax.jit(f).trace(jnp.ones(4)).lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r"stablehlo.send", text)) == 2 * 2


GPUS = pytest.mark.parametrize("platform", ["cuda", "rocm"])


def lowered(f: Any, x: Any, platform: str) -> str:
    return f.trace(x).lower(lowering_platforms=(platform,)).as_text()


def calls(text: str) -> list[str]:
    return re.findall(r"custom_call @(hostcallback\w*|xla_ffi_python_gpu_callback)", text)


@GPUS
def test_a_tapped_program_lowers_for_gpus(platform: str) -> None:
    native = transport.use_native(platform)
    target = transport.FFI_TARGET if native else "xla_ffi_python_gpu_callback"
    assert calls(lowered(jax.jit(tapped), jnp.ones(4), platform)) == [target] * 3


@pytest.mark.native_only
@GPUS
def test_a_check_on_a_gpu_has_no_branch_that_the_host_would_have_to_wait_for(platform: str) -> None:
    def checked(x: Any) -> Any:
        hcb.check(jnp.all(x > 0), "x must be positive: {}", x)
        return x

    assert "stablehlo.if" not in (text := lowered(jax.jit(checked), jnp.ones(4), platform))
    assert calls(text) == [transport.FFI_TARGET]
    assert "stablehlo.if" in lowered(jax.jit(checked), jnp.ones(4), "cpu"), (
        "it costs less where no caller waits"
    )


@pytest.mark.native_only
def test_a_call_on_a_gpu_is_a_callback_in_its_place_among_the_taps() -> None:
    def f(x: Any) -> Any:
        hcb.id_tap(print, x)
        y = hcb.call(np.sin, x, result_shape=x)
        return hcb.id_tap(print, y)

    text = lowered(jax.jit(f), jnp.ones(4), "cuda")
    assert calls(text) == ["hostcallback_tap", "xla_ffi_python_gpu_callback", "hostcallback_tap"]
    tokens = re.findall(r"(%\d+)(?::\d)? = stablehlo.custom_call @\w+\((%\w+)", text)
    results, operands = zip(*tokens, strict=True)
    assert operands[1:] == results[:-1], "each takes the token of the one before it"


@pytest.mark.native_only
def test_the_compiler_partitions_a_tap_on_gpus_into_native_calls() -> None:
    mesh = Mesh(jax.devices(), ("i",))
    x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("i")))
    text = lowered(jax.jit(lambda x: hcb.id_tap(print, x)), x, "cuda")
    assert calls(text) == ["hostcallback_partitioned_tap"]
    assert transport.FFI_SHARD_TARGET in text


@pytest.mark.native_only
@GPUS
def test_a_program_is_exported_for_gpus_that_this_machine_does_not_have(platform: str) -> None:
    f = jax.jit(lambda x: hcb.id_tap(print, x, name="loss"))
    exported = jax.export.export(f, platforms=[platform], disabled_checks=hcb.export_checks())(jnp.ones(4))
    assert calls(exported.mlir_module()) == [transport.FFI_TARGET]


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
