"""Under automatic sharding every device sends its shard, no collective is added, and the tap sees the whole array."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from recorder import Recorder
from threads import in_threads

COLLECTIVES = re.compile(
    r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
)
SPECS = [P("i", "j"), P("j", "i"), P("i"), P(None, "j"), P(("i", "j")), P(("j", "i")), P()]


def mesh_of_four() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("i", "j"))


def sharded(value: Any, spec: P, mesh: Mesh | None = None) -> Any:
    return jax.device_put(jnp.asarray(value), NamedSharding(mesh or mesh_of_four(), spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_tap_gets_the_whole_array_once(spec: P, rec: Recorder) -> None:
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    out = jax.jit(lambda x: hcb.id_tap(rec, x * 2) + 1)(sharded(whole, spec))
    hcb.barrier_wait()
    np.testing.assert_array_equal(out, 2 * whole + 1)
    assert len(rec) == 1
    np.testing.assert_array_equal(rec.values[0], 2 * whole)
    assert rec.values[0].flags.writeable
    assert rec.devices == [jax.devices()[0]]


def test_an_eager_tap_of_a_sharded_array_gets_the_whole_array(rec: Recorder) -> None:
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    hcb.id_tap(rec, sharded(whole, P("i", "j")))
    hcb.barrier_wait()
    assert len(rec) == 1
    np.testing.assert_array_equal(rec.values[0], whole)


def test_each_devices_shard_comes_with_its_place_on_request() -> None:
    got: dict[int, Any] = {}
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def keep(x: Any, *, device: Any, index: Any) -> None:
        got[device.id] = x["a"], index

    def f(x: Any) -> Any:
        return hcb.id_tap(keep, {"a": x * 2, "b": x.sum()}, sharding="local")

    x = sharded(whole, P("j", "i"))
    jax.jit(f)(x)
    hcb.barrier_wait()
    assert sorted(got) == [0, 1, 2, 3]
    for shard in x.addressable_shards:
        part, index = got[shard.device.id]
        np.testing.assert_array_equal(part, 2 * np.asarray(shard.data))
        np.testing.assert_array_equal(2 * whole[index[0]], part)
        assert index[1] == ()


def program(rec: Callable[..., None]) -> Callable[[Any], Any]:
    """Taps in straight-line code, scan, while, cond and fori_loop."""

    def f(x: Any) -> Any:
        x = hcb.id_tap(rec, x, at="start")

        def step(c: Any, i: Any) -> Any:
            c = hcb.id_tap(rec, c + 1, at="scan")
            c = lax.cond(
                i % 2 == 0,
                lambda c: hcb.id_tap(rec, c, at="even"),
                lambda c: hcb.id_tap(rec, c * 1, at="odd"),
                c,
            )
            return c, None

        x, _ = lax.scan(step, x, jnp.arange(3))
        _, x = lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, hcb.id_tap(rec, c[1] + 1, at="while")), (0, x)
        )
        x = lax.fori_loop(0, 2, lambda i, c: hcb.id_tap(rec, c + 1, at="fori"), x)
        hcb.id_tap(rec, x, at="unused")
        return x.at[0].set(0.0)

    return f


PLACES = ["start", "scan", "even", "scan", "odd", "scan", "even", "while", "while", "fori", "fori", "unused"]


def test_taps_in_control_flow_keep_program_order(rec: Recorder) -> None:
    jax.jit(program(rec))(sharded(np.zeros((8, 8), np.float32), P("i", "j")))
    hcb.barrier_wait()
    assert [kwargs["at"] for kwargs in rec.kwargs] == PLACES
    expected = [0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7]
    for value, number in zip(rec.values, expected, strict=True):
        np.testing.assert_array_equal(value, np.full((8, 8), number))


@pytest.mark.slow_variants(every=3)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_collective_is_added_to_the_program(spec: P) -> None:
    x = sharded(np.zeros((8, 8), np.float32), spec)

    def untapped(x: Any) -> Any:
        x, _ = lax.scan(lambda c, _: (c + 1, None), x, None, length=3)
        return x.at[0].set(0.0)

    text = jax.jit(program(lambda *_, **__: None)).lower(x).compile().as_text()
    assert "hostcallback_tap_shard" in text or "python_cpu_callback" in text
    assert (
        COLLECTIVES.findall(text) == COLLECTIVES.findall(jax.jit(untapped).lower(x).compile().as_text()) == []
    )
    # The pattern does find collectives: this program needs one.
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh_of_four(), P()))
    if spec != P():
        assert COLLECTIVES.findall(gathered.lower(x).compile().as_text())


def test_long_scans_keep_every_value_in_order(rec: Recorder) -> None:
    steps = 2000

    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (hcb.id_tap(rec, c + 1), None), x, None, length=steps)[0]

    jax.jit(f)(sharded(np.zeros(8, np.float32), P("i")))
    hcb.barrier_wait()
    np.testing.assert_array_equal(np.stack(rec.values)[:, 0], np.arange(1, steps + 1))
    assert all((value == value[0]).all() for value in rec.values)


def test_many_launches_are_distinguished(rec: Recorder) -> None:
    f = jax.jit(lambda x: hcb.id_tap(rec, x))
    for step in range(400):  # more than are remembered
        f(sharded(np.full((4, 4), step, np.float32), P("i", "j")))
    hcb.barrier_wait()
    assert [float(v[0, 0]) for v in rec.values] == list(range(400))
    assert all((value == value[0, 0]).all() for value in rec.values)


@pytest.mark.native_only  # a Python callback is not told which launch it belongs to: see docs/design/sharded-taps.md
def test_launches_of_several_threads_are_not_mixed(rec: Recorder) -> None:
    f = hcb.jit(lambda x: hcb.id_tap(rec, x))
    f(sharded(np.full((4, 4), -1, np.float32), P("i", "j")))  # compiled once

    def work(number: int) -> None:
        for step in range(50):
            f(sharded(np.full((4, 4), 100 * number + step, np.float32), P("i", "j")))

    in_threads(work, 4)
    hcb.barrier_wait()
    values = rec.values[1:]
    assert all((value == value[0, 0]).all() for value in values)
    seen = [int(value[0, 0]) for value in values]
    assert sorted(seen) == [100 * n + step for n in range(4) for step in range(50)]


def test_grad_and_vmap_of_sharded_taps(rec: Recorder) -> None:
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)

    def loss(row: Any) -> Any:
        return (hcb.id_tap(rec, row) ** 2).sum()

    grads = jax.jit(jax.vmap(jax.grad(loss)))(sharded(x, P("i", "j")))
    hcb.barrier_wait()
    np.testing.assert_array_equal(grads, 2 * x)
    assert rec.transforms == [
        (("batch", {"batch_dims": (0,)}),),
        (("jvp", {}), ("transpose", {}), ("batch", {"batch_dims": (0,)})),
    ]
    np.testing.assert_array_equal(rec.values[0], x)
    np.testing.assert_array_equal(rec.values[1], 2 * x)


@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "uint8", "int64", "bfloat16", "complex64", "float8_e4m3fn"]
)
def test_every_kind_of_element_is_assembled(dtype: str, rec: Recorder) -> None:
    with jax.enable_x64(True):
        value = (np.arange(64).reshape(8, 8) % 3).astype(jnp.dtype(dtype))
        hcb.jit(lambda x: hcb.id_tap(rec, x))(sharded(value, P("i", "j")))
        hcb.barrier_wait()
    assert rec.values[0].dtype == value.dtype
    np.testing.assert_array_equal(rec.values[0].astype(np.complex64), value.astype(np.complex64))


def test_unevenly_divided_arrays_are_trimmed() -> None:
    rec, local = Recorder(), Recorder()
    sharding = NamedSharding(Mesh(jax.devices(), ("i",)), P("i"))
    value = np.arange(10.0, dtype=np.float32)

    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(jnp.concatenate([x, x + 8])[:10] * 1, sharding)
        hcb.id_tap(local, y, sharding="local")
        return hcb.id_tap(rec, y).sum()

    jax.jit(f)(sharded(np.arange(8.0, dtype=np.float32), P("i"), Mesh(jax.devices(), ("i",))))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0], value)
    by_device = sorted(
        zip((d.id for d in local.devices), local.values, strict=True), key=lambda pair: pair[0]
    )
    np.testing.assert_array_equal(np.concatenate([v for _, v in by_device]), value)


def test_large_arrays_and_arrays_of_two_devices(rec: Recorder) -> None:
    mesh = Mesh(jax.devices()[2:], ("d",))
    value = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    jax.jit(lambda x: hcb.id_tap(rec, x))(sharded(value, P(None, "d"), mesh))
    hcb.barrier_wait()
    np.testing.assert_array_equal(rec.values[0], value)
    assert rec.devices == [jax.devices()[2]]


def test_a_failing_tap_is_reported_once_with_its_line() -> None:
    def fail(x: Any) -> None:
        raise ValueError("no")

    jax.jit(lambda x: hcb.id_tap(fail, x))(sharded(np.zeros((4, 4), np.float32), P("i", "j")))
    with pytest.raises(hcb.TapFunctionException) as caught:
        hcb.barrier_wait()
    assert [f.source_line.rpartition("/")[2].partition(":")[0] for f in caught.value.failures] == [
        "test_automatic_sharding.py"
    ]


def test_equal_taps_in_a_sharded_and_in_a_plain_program_do_not_meet(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        return hcb.id_tap(rec, x)

    jitted = hcb.jit(f)
    jitted(jnp.ones((4, 4)))
    jitted(sharded(np.full((4, 4), 2, np.float32), P("i")))
    jitted(jnp.full((4, 4), 3.0))
    hcb.barrier_wait()
    assert sorted(float(v.mean()) for v in rec.values) == [1.0, 2.0, 3.0]
    assert all(value.shape == (4, 4) for value in rec.values)


def test_unordered_taps_are_assembled_too(rec: Recorder) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            for k in range(3):
                hcb.id_tap(rec, c + k, ordered=False)
            return c + 10, None

        return lax.scan(step, x, None, length=5)[0]

    hcb.jit(f)(sharded(np.zeros((4, 4), np.float32), P("i", "j")))
    hcb.barrier_wait()
    assert sorted(float(v[0, 0]) for v in rec.values) == sorted(
        10.0 * i + k for i in range(5) for k in range(3)
    )
    assert all((value == value[0, 0]).all() for value in rec.values)


def test_id_print_of_a_sharded_array_prints_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    hcb.jit(lambda x: hcb.id_print(x, what="x"))(sharded(np.arange(4, dtype=np.float32), P("i")))
    hcb.barrier_wait()
    assert capsys.readouterr().out == "what: x\n[0. 1. 2. 3.]\n"


def test_id_print_of_shards_prints_their_places(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = Mesh(jax.devices()[:2], ("i",))
    hcb.jit(lambda x: hcb.id_print(x, sharding="local"))(
        sharded(np.arange(4, dtype=np.float32), P("i"), mesh)
    )
    hcb.barrier_wait()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(zip(lines[::2], lines[1::2], strict=True)) == [
        ("device: cpu:0 index: [0:2]", "[0. 1.]"),
        ("device: cpu:1 index: [2:4]", "[2. 3.]"),
    ]


def test_a_wrong_sharding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sharding='shard', expected 'global' .* or 'local'"):
        hcb.id_tap(print, 1.0, sharding="shard")
