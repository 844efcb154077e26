"""`hcb.scan(watch=True)`: the operation and its iteration are named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec as P
from watching import errors_of, line_of

import hostcallback as hcb

ONES = jnp.ones(4)


def body(w: Any, x: Any) -> Any:
    with jax.named_scope("layer"):
        y = jnp.log(x)  # scanned
    return w * 0.5 + y, y * 2


def scan(w: Any, xs: Any, **options: Any) -> Any:
    return hcb.scan(body, w, xs, progress=False, watch=True, **options)


def with_zero_at(iteration: int, length: int) -> Any:
    return jnp.ones((length, 4)).at[iteration, 1].set(0)


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize(("iteration", "length"), [(31_415, 32_000), (0, 5), (70, 75), (64, 128)])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_iteration_of_a_compiled_epoch_is_found(iteration: int, length: int, reverse: bool) -> None:
    run = jax.jit(lambda w, xs: scan(w, xs, reverse=reverse), donate_argnums=0)
    (error,) = errors_of(lambda: run(jnp.ones(4), with_zero_at(iteration, length)))
    assert (error.primitive, error.scope, error.iteration) == ("log", "layer", (iteration,))
    assert (error.inf_count, error.reproduced, error.check.count) == (1, True, 1)
    assert error.source_line.line == line_of(__file__, "scanned")


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("length", [0, 5, 128, 130])
@pytest.mark.parametrize("reverse", [False, True])
def test_results_and_gradients_are_those_of_lax_scan(length: int, reverse: bool) -> None:
    w, xs = jnp.ones(4), 1 + jnp.arange(4.0 * length).reshape(length, 4)

    def loss(run: Any, w: Any) -> Any:
        carry, ys = run(body, w, xs, reverse=reverse)
        return carry.sum() + ys.sum(), (carry, ys)

    def watched(f: Any, w: Any, xs: Any, **options: Any) -> Any:
        return hcb.scan(f, w, xs, progress=False, watch=True, **options)

    ours = jax.jit(jax.grad(lambda w: loss(watched, w), has_aux=True))(w)
    theirs = jax.jit(jax.grad(lambda w: loss(lax.scan, w), has_aux=True))(w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)
    hcb.barrier_wait()


def test_backward_pass_of_a_scanned_training_step() -> None:
    def step(w, x):
        return w - 0.01 * jax.grad(lambda w: jnp.sum(jnp.sqrt(w * x)))(w), None

    run = jax.jit(lambda w, xs: hcb.scan(step, w, xs, progress=False, watch=True))
    errors = errors_of(lambda: run(jnp.ones(4), with_zero_at(20, 40)))
    assert errors[0].iteration == (20,)


def test_under_vmap_and_shard_map() -> None:
    (error,) = errors_of(
        lambda: jax.jit(jax.vmap(scan))(jnp.ones((2, 4)), jnp.stack([with_zero_at(3, 20)] * 2))
    )
    assert (error.iteration, error.inf_count) == ((3,), 2)
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def part(w, xs):
        def step(w, x):
            return w + lax.psum(jnp.log(x), "i") * 0.0, None

        return hcb.scan(step, lax.psum(w, "i"), xs[0], progress=False, watch=True)[0]

    xs = jnp.ones((len(jax.devices()), 20, 4)).at[1, 7, 0].set(0)
    run = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P()))
    errors = errors_of(lambda: run(jnp.ones((len(jax.devices()), 4)), xs))
    assert [(e.primitive, e.iteration, e.device) for e in errors] == [("log", (7,), "cpu:1")]


def test_the_element_of_the_data_is_named_with_the_iteration() -> None:
    xs = jnp.ones((4000, 4)).at[1234, 2].set(jnp.nan)
    run = jax.jit(lambda xs: hcb.scan(lambda w, x: (w * 0.9 + x, None), ONES, xs, progress=False, watch=True))
    (error,) = errors_of(lambda: run(xs))
    assert (error.primitive, error.iteration) == ("input xs[1234,2]", (1234,))


def test_taps_happen_once() -> None:
    seen: list[Any] = []

    def step(w, x):
        hcb.tap(seen.append, w[0])
        return body(w, x)

    (error,) = errors_of(
        lambda: jax.jit(
            lambda: hcb.scan(step, jnp.ones(4), with_zero_at(3, 20), progress=False, watch=True)
        )()
    )
    assert (error.iteration, len(seen)) == ((3,), 20)


@pytest.mark.parametrize("length", [20, 10_000])
def test_callbacks_with_results_are_not_called_again(length: int) -> None:
    calls = []

    def read():
        calls.append(None)
        return np.float32(len(calls) < 5)

    def step(w, x):
        return w + jnp.log(io_callback(read, jax.ShapeDtypeStruct((), jnp.float32))), None

    (error,) = errors_of(
        lambda: jax.jit(lambda: hcb.scan(step, 0.0, None, length, progress=False, watch=True)[0])()
    )
    assert len(calls) == length
    assert error.reproduced is False
    assert "would repeat io_callback at " in str(error)


def test_a_second_run_with_other_results_is_reported_as_such() -> None:
    calls = []

    def draw(x):
        calls.append(x)
        return np.float32(np.inf if len(calls) == 5 else 1)

    def step(w, x):
        return w * 0.5 + jax.pure_callback(draw, jax.ShapeDtypeStruct((), jnp.float32), x), None

    run = jax.jit(lambda xs: hcb.scan(step, jnp.float32(0), xs, progress=False, watch=True)[0])
    (error,) = errors_of(lambda: run(jnp.arange(16.0)))
    assert error.reproduced is False
    assert "calls pure_callback at " in str(error)


def test_a_bar_and_a_watch_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"add progress=False, at .*test_watched_scan\.py"):
        hcb.scan(body, jnp.ones(4), jnp.ones((3, 4)), watch=True)


@pytest.mark.slow_variants
@pytest.mark.parametrize(
    "loop",
    [
        lambda x: hcb.fori_loop(0, 9, lambda i, c: jnp.log(4.0 - i) + c * 0, x),
        lambda x: hcb.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, jnp.log(4.0 - c[0])), (0, x))[1],
        lambda x: hcb.scan(lambda c, i: (jnp.log(4.0 - i) + c * 0, None), x, jnp.arange(9.0), progress=True)[
            0
        ],
    ],
    ids=["fori_loop", "while_loop", "scan"],
)
def test_a_loop_with_a_bar_outside_of_jit_is_watched(loop: Any) -> None:
    (error, *_) = errors_of(lambda: hcb.watch_nonfinite(loop)(jnp.float32(1)))
    assert (error.primitive, error.inf_count, error.iteration) == ("log", 1, (4,))
    (error, *_) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(loop))(jnp.float32(1)))
    assert (error.primitive, error.inf_count, error.iteration) == ("log", 1, (4,))
    (error, *_) = errors_of(lambda: hcb.watch_nonfinite(jax.jit(loop), mode="every")(jnp.float32(1)))
    assert (error.primitive, error.inf_count, error.iteration) == ("log", 1, (4,))
