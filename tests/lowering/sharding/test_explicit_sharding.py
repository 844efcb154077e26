"""Under explicit sharding (shardings in types) taps behave as under automatic sharding, and keep the types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from recorder import Recorder

WHOLE = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(
    params=[(AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)], ids=["explicit", "mixed"]
)
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=request.param)
    with jax.set_mesh(mesh):
        yield mesh


def argument(mesh: Any) -> Any:
    return jax.device_put(WHOLE, NamedSharding(mesh, P("i", "j")))


def test_the_tap_gets_the_whole_array_and_keeps_its_type(mesh: Any, rec: Recorder) -> None:
    def f(x: Any) -> Any:
        y = x * 2
        tapped = hcb.id_tap(rec, y)
        assert jax.typeof(tapped) == jax.typeof(y)
        return tapped + 1

    out = jax.jit(f)(argument(mesh))
    hcb.barrier_wait()
    np.testing.assert_array_equal(out, 2 * WHOLE + 1)
    assert len(rec) == 1
    np.testing.assert_array_equal(rec.values[0], 2 * WHOLE)


def test_control_flow_grad_and_vmap(mesh: Any, rec: Recorder) -> None:
    def loss(x: Any) -> Any:
        x, _ = lax.scan(lambda c, _: (hcb.id_tap(rec, c * 2, at="scan"), None), x, None, length=2)
        return (x**2).sum()

    grads = jax.jit(jax.grad(loss))(argument(mesh))
    hcb.barrier_wait()
    np.testing.assert_array_equal(grads, 32 * WHOLE)
    assert [len(t) for t in rec.transforms] == [0, 0, 2, 2]
    for value, factor in zip(rec.values, [2, 4, 8, 16], strict=True):
        np.testing.assert_array_equal(value, factor * WHOLE)


def test_local_shards_with_their_place(mesh: Any) -> None:
    got: dict[int, Any] = {}
    x = argument(mesh)
    jax.jit(
        lambda x: hcb.id_tap(
            lambda part, device, index: got.update({device.id: (part, index)}), x, sharding="local"
        )
    )(x)
    hcb.barrier_wait()
    assert sorted(got) == [0, 1, 2, 3]
    for part, (place,) in got.values():
        np.testing.assert_array_equal(part, WHOLE[place])


def test_an_eager_tap(mesh: Any, rec: Recorder) -> None:
    out = hcb.id_tap(rec, argument(mesh))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0], WHOLE)
    assert jnp.array_equal(out, WHOLE)


def grow(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 5000, lambda c: c * 2, x)


@pytest.mark.parametrize("kind", ["plain", "nested", "while", "jvp"])
def test_vmap_of_a_branch_sends_the_elements_that_take_it(mesh: Any, rec: Recorder, kind: str) -> None:
    def taken(row: Any) -> Any:
        row = hcb.id_tap(rec, row, tap_tangents=False)
        if kind == "nested":
            row = lax.cond(
                row[0] > 40, lambda row: hcb.id_tap(lambda row: None, row) * 1, lambda row: row, row
            )
        return grow(row) if kind == "while" else row * 2

    def f(x: Any) -> Any:
        return jax.vmap(lambda row: lax.cond(row.sum() > 300, taken, lambda row: row, row))(x)

    x = jax.device_put(WHOLE, NamedSharding(mesh, P("i", None)))
    program = jax.jit(lambda x: jax.jvp(f, (x,), (x,))[0]) if kind == "jvp" else jax.jit(f)
    out = program(x)
    hcb.barrier_wait()
    (value,) = rec.values
    assert value.tolist() == [row.tolist() for row in WHOLE if row.sum() > 300]
    if kind != "while":
        np.testing.assert_array_equal(out, np.where(WHOLE.sum(1, keepdims=True) > 300, WHOLE * 2, WHOLE))


def test_a_histogram_of_a_place(mesh: Any) -> None:
    got: list[Any] = []
    f = jax.jit(jnp.sin)
    seen = hcb.observe(where="sin", what=["histogram", "mean"], tap_func=got.append)
    with hcb.outfeed_receiver(), seen:
        f(argument(mesh))
    (record,) = got[0].values()
    # The one zero, sin(0), is not counted.
    assert record["histogram"].sum() == WHOLE.size - 1
    np.testing.assert_allclose(record["mean"], np.sin(WHOLE).mean(), rtol=1e-4)
