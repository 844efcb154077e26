"""Taps under `jax.experimental.jet` and in functions that `jax.experimental.sparse.sparsify` takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.jet import jet

import hostcallback as hcb
from recorder import Recorder
from transforming import PRIMAL, Jit, delivered

DENSE = jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])


@pytest.mark.parametrize("ordered", [True, False])
def test_jet_taps_the_primals_and_leaves_the_series_alone(jit: Jit, ordered: bool, rec: Recorder) -> None:
    def tapped(x: Any) -> Any:
        return jnp.exp(hcb.id_tap(rec, {"x": 2 * x}, ordered=ordered)["x"])

    def expand(f: Any) -> Any:
        return jit(lambda x: jet(f, (x,), ([1.0, 3.0],)))(0.5)

    assert jax.tree.map(float, expand(tapped)) == jax.tree.map(float, expand(lambda x: jnp.exp(2 * x)))
    assert delivered(rec) == [(PRIMAL, {"x": 1.0})]


def test_jet_of_a_function_that_calls_jitted_ones(rec: Recorder) -> None:
    jitted = jax.jit(lambda x: jnp.sin(hcb.id_tap(rec, x)))
    jet(jitted, (2.0,), ([1.0],))
    jax.jit(lambda x: jet(lambda x: jitted(x) * jitted(x + 1), (x,), ([1.0],)))(2.0)
    assert delivered(rec) == [(PRIMAL, 2.0), (PRIMAL, 2.0), (PRIMAL, 3.0)]


def test_jet_of_other_taps(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        hcb.print("x {}", x)
        hcb.check(x > 3, "{x} is too small", x=x)
        return x * x

    jax.jit(lambda x: jet(f, (x,), ([1.0],)))(2.0)
    with pytest.raises(hcb.TapFunctionException, match=r"2\.0 is too small"):
        hcb.barrier_wait()
    assert capsys.readouterr().out == "x 2.0\n"


def test_jet_of_a_call_is_refused_with_the_line_and_the_cure() -> None:
    def f(x: Any) -> Any:
        return hcb.call(abs, x, result_shape=x)

    with pytest.raises(
        ValueError, match=r"the call of abs at .*test_jet.*\.py:\d+ .*differentiated.*custom_jvp"
    ):
        jet(f, (2.0,), ([1.0],))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR])
def test_sparsify_taps_a_sparse_array_as_its_dense_equivalent(jit: Jit, kind: Any, rec: Recorder) -> None:
    matrix = kind.fromdense(DENSE)
    result = jit(sparse.sparsify(lambda m: hcb.id_tap(rec, m)))(matrix)
    assert isinstance(result, kind)
    assert result.todense().tolist() == DENSE.tolist()
    assert delivered(rec) == [(PRIMAL, DENSE.tolist())]


@pytest.mark.parametrize("use_tracer", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_sparse_and_dense_arrays_may_be_in_one_tap(use_tracer: bool, ordered: bool, rec: Recorder) -> None:
    def f(matrix: Any, vector: Any) -> Any:
        matrix, vector = hcb.id_tap(rec, (matrix, vector), ordered=ordered)
        return hcb.id_tap(rec, matrix @ vector, ordered=ordered)

    sparsified = jax.jit(sparse.sparsify(f, use_tracer=use_tracer))
    assert sparsified(sparse.BCOO.fromdense(DENSE), jnp.ones(3)).tolist() == [3, 3]
    assert delivered(rec) == [(PRIMAL, (DENSE.tolist(), [1, 1, 1])), (PRIMAL, [3, 3])]


def test_sparsify_of_loops_branches_and_jits(rec: Recorder) -> None:
    inner = jax.jit(lambda m: hcb.id_tap(rec, m * 2))

    def f(m: Any) -> Any:
        m = lax.while_loop(lambda m: (m @ jnp.ones(3))[0] < 10, inner, m)
        m = lax.cond((m @ jnp.ones(3))[0] > 1, lambda m: hcb.id_tap(rec, m), lambda m: m, m)
        return lax.scan(lambda m, _: (hcb.id_tap(rec, m), None), m, None, length=2)[0]

    jax.jit(sparse.sparsify(f))(sparse.BCOO.fromdense(DENSE))
    factors = [2, 4, 4, 4, 4]
    assert delivered(rec) == [(PRIMAL, (factor * DENSE).tolist()) for factor in factors]


def test_sparsify_hands_a_call_dense_arrays() -> None:
    f = sparse.sparsify(lambda m: hcb.call(lambda a: a.sum(), m, result_shape=jnp.float32(0)))
    assert float(jax.jit(f)(sparse.BCOO.fromdense(DENSE))) == 6


def test_a_sparse_array_outside_of_sparsify_is_a_pytree_like_any_other(rec: Recorder) -> None:
    jax.jit(lambda m: hcb.id_tap(rec, m))(sparse.BCOO.fromdense(DENSE))
    hcb.barrier_wait()
    assert rec.values[0].data.tolist() == [1, 2, 3]
