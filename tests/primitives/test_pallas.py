"""Taps in Pallas kernels arrive where a kernel is interpreted, and are refused where it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

import hostcallback as hcb
from recorder import Recorder
from transforming import JVP, PRIMAL, Jit, delivered

Kernel = Callable[[Any, Any], None]
X = jnp.arange(8.0)
PAIRS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def run(kernel: Kernel, x: Any, *, interpret: Any = True) -> Any:
    """Runs a kernel on two elements at a time."""
    block = pl.BlockSpec((2,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 2,),
        in_specs=[block],
        out_specs=block,
        interpret=interpret,
    )(x)


def square(tap: Callable[..., Any], **options: Any) -> Kernel:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = hcb.id_tap(tap, x_ref[...], **options) ** 2

    return kernel


@pytest.mark.parametrize("ordered", [True, False])
def test_an_interpreted_kernel_taps_in_each_step_of_its_grid(jit: Jit, ordered: bool, rec: Recorder) -> None:
    result = jit(lambda x: run(square(rec, ordered=ordered), x))(X)
    assert result.tolist() == (X**2).tolist()
    assert delivered(rec) == [(PRIMAL, pair) for pair in PAIRS]


def test_ordered_taps_in_and_around_a_kernel_keep_program_order(jit: Jit, rec: Recorder) -> None:
    def program(x: Any) -> Any:
        hcb.id_tap(rec, "before")
        y = run(square(rec), x)
        hcb.id_tap(rec, "between")
        y = run(square(rec), y)
        hcb.id_tap(rec, "after")
        return y

    jit(program)(X[:2])
    hcb.barrier_wait()
    values = [value if isinstance(value, str) else value.tolist() for value in rec.values]
    assert values == ["before", [0, 1], "between", [0, 1], "after"]


def test_the_tpu_interpreter_runs_taps_too(rec: Recorder) -> None:
    jax.jit(lambda x: run(square(rec), x, interpret=pltpu.InterpretParams()))(X)
    with pltpu.force_tpu_interpret_mode():
        jax.jit(lambda x: run(square(rec), x, interpret=False))(X)
    assert delivered(rec) == [(PRIMAL, pair) for pair in 2 * PAIRS]


def test_branches_loops_and_inner_jits_of_a_kernel(rec: Recorder) -> None:
    inner = jax.jit(lambda x: hcb.id_tap(rec, x))

    def kernel(x_ref: Any, o_ref: Any) -> None:
        step = pl.program_id(0)

        @pl.when(step % 2 == 1)
        def _() -> None:
            hcb.id_tap(rec, step)

        o_ref[...] = x_ref[...] + lax.fori_loop(0, 2, lambda i, total: total + inner(x_ref[i]), 0.0)

    assert jax.jit(lambda x: run(kernel, x))(X).tolist() == [1, 2, 7, 8, 13, 14, 19, 20]
    assert [value for _, value in delivered(rec)] == [0, 1, 1, 2, 3, 4, 5, 3, 6, 7]


def test_a_reference_is_tapped_as_the_value_that_it_holds_then(rec: Recorder) -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]
        hcb.id_tap(rec, o_ref)
        o_ref[...] = x_ref[...] * 2
        hcb.id_tap(rec, o_ref)

    jax.jit(lambda x: run(kernel, x))(X[:4])
    assert [value for _, value in delivered(rec)] == [[0, 1], [0, 2], [2, 3], [4, 6]]


def test_a_kernel_whose_result_is_unused_taps(jit: Jit, rec: Recorder) -> None:
    def unused(x: Any) -> Any:
        run(square(rec), x)
        return x

    jit(unused)(X[:2])
    jit(lambda x: lax.scan(lambda c, x: (c, unused(x)), 0, x))(X.reshape(4, 2))
    assert [value for _, value in delivered(rec)] == [PAIRS[0], *PAIRS]


def test_vmap_adds_a_dimension_to_the_grid_so_each_element_taps(rec: Recorder) -> None:
    jax.jit(jax.vmap(lambda x: run(square(rec), x)))(X.reshape(4, 2))
    assert delivered(rec) == [(PRIMAL, pair) for pair in PAIRS]


def test_jvp_taps_primals_and_tangents(rec: Recorder) -> None:
    jax.jit(lambda x: jax.jvp(lambda x: run(square(rec), x), (x,), (x + 1,)))(X[:2])
    assert delivered(rec) == [(PRIMAL, [0, 1]), ((JVP,), [1, 2])]


def test_each_device_of_a_shard_map_taps_its_kernels_values(rec: Recorder) -> None:
    spec = PartitionSpec("i")
    mapped = jax.shard_map(
        lambda x: run(square(rec), x),
        mesh=Mesh(jax.devices(), ("i",)), in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    jax.jit(mapped)(X)
    for device, pair in zip(jax.devices(), PAIRS, strict=True):
        assert delivered(rec, device) == [(PRIMAL, pair)]


def test_taps_of_every_kind_work_in_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        x = x_ref[...]
        hcb.print("block {}", x)
        hcb.check(x < 3, "{x} is too large", x=x)
        o_ref[...] = hcb.call(lambda x: x * 10, x, result_shape=x)

    assert jax.jit(lambda x: run(kernel, x))(X[:4]).tolist() == [0, 10, 20, 30]
    with pytest.raises(hcb.TapFunctionException, match="is too large"):
        hcb.barrier_wait()
    assert capsys.readouterr().out == "block [0. 1.]\nblock [2. 3.]\n"


def index_map_that_taps(rec: Recorder) -> Callable[[Any], Any]:
    def copy(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    def program(x: Any, interpret: bool = True) -> Any:
        return pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4,),
            in_specs=[pl.BlockSpec((2,), lambda i: (hcb.id_tap(rec, i),))],
            out_specs=pl.BlockSpec((2,), lambda i: (i,)),
            interpret=interpret,
        )(x)

    return program


def test_an_index_map_may_tap(rec: Recorder) -> None:
    jax.jit(index_map_that_taps(rec))(X)
    assert [value for _, value in delivered(rec)] == [0, 1, 2, 3]


CURE = r"test_pallas\.py:\d+ .*Pallas kernel that is compiled.*interpret=True"


def test_a_compiled_kernel_refuses_taps_with_the_line_and_the_cure(rec: Recorder) -> None:
    with pytest.raises(NotImplementedError, match="the tap Recorder.* at .*" + CURE):
        jax.jit(lambda x: run(square(rec), x, interpret=False)).lower(X)

    def calling(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = lax.cond(
            x_ref[0] > 0, lambda x: hcb.call(abs, x, result_shape=x), lambda x: x, x_ref[...]
        )

    with pytest.raises(NotImplementedError, match="the call of abs at .*" + CURE):
        jax.jit(lambda x: run(calling, x, interpret=False)).lower(X)
    with pytest.raises(NotImplementedError, match=CURE):
        jax.jit(lambda x: index_map_that_taps(rec)(x, interpret=False)).lower(X)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_kernel_lowered_for_another_platform_taps_too(platform: str, rec: Recorder) -> None:
    with pytest.raises(NotImplementedError, match=CURE):
        jax.jit(lambda x: run(square(rec), x, interpret=False)).trace(X).lower(lowering_platforms=(platform,))
    with pytest.raises(NotImplementedError, match=CURE):
        jax.export.export(jax.jit(lambda x: run(square(rec), x, interpret=False)), platforms=[platform])(X)
