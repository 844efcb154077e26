"""`hcb.metrics` under vmap with a step for each lane: a record for each step, of the lanes that send it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting_writer import CollectingWriter
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import hostcallback as hcb
from hostcallback.receiver.sinks.metric_writers import lanes

STEPS = np.array([10, 20, 10, 5])


@pytest.fixture
def writer() -> CollectingWriter:
    return CollectingWriter()


def send(x: Any, step: Any, **options: Any) -> Any:
    hcb.metrics({"x": x}, step=step, **options)
    return x


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("mean", [(5, 3.0), (10, 1.0), (20, 1.0)]),
        ("sum", [(5, 3.0), (10, 2.0), (20, 1.0)]),
        ("last", [(5, 3.0), (10, 2.0), (20, 1.0)]),
        ("max", [(5, 3.0), (10, 2.0), (20, 1.0)]),
        ("min", [(5, 3.0), (10, 0.0), (20, 1.0)]),
    ],
)
def test_each_step_is_a_record_of_its_lanes(reduce: str, expected: Any, writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(lambda x, s: send(x, s, reduce=reduce)))(jnp.arange(4.0), STEPS)
    assert [(step, row["x"]) for step, row in writer.rows] == expected


def test_lanes_apart_keep_their_numbers(writer: CollectingWriter) -> None:
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(lambda x, s: send(x, s, reduce="each")))(jnp.arange(4.0), STEPS)
    assert writer.rows == [(5, {"x/3": 3.0}), (10, {"x/0": 0.0, "x/2": 2.0}), (20, {"x/1": 1.0})]


def test_forms_have_the_lanes_of_the_step(writer: CollectingWriter) -> None:
    def emit(x: Any, step: Any) -> None:
        values = {"h": hcb.histogram(x * jnp.ones(2)), "t": hcb.text("x {}", x), "n": x}
        hcb.metrics(
            values | {"i": hcb.image(jnp.full((1, 1), x, jnp.uint8))}, step=step, reduce={"n": "histogram"}
        )

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(emit))(jnp.arange(4.0), STEPS)
    found = [(step, h["h"][0].tolist(), h["n"][0].tolist()) for step, h in writer.histograms]
    assert found == [(5, [3, 3], [3]), (10, [0, 0, 2, 2], [0, 2]), (20, [1, 1], [1])]
    assert writer.texts == [(5, {"t": "x 3.0"}), (10, {"t": "x 2.0"}), (20, {"t": "x 1.0"})]
    assert [(step, images["i"].item()) for step, images in writer.images] == [(5, 3), (10, 2), (20, 1)]


def test_a_value_that_is_not_batched_counts_once_for_each_step(writer: CollectingWriter) -> None:
    def emit(x: Any, y: Any, step: Any) -> None:
        hcb.metrics({"both": x + y, "outer": x, "one": 7.0}, step=step, reduce="sum")

    inner = jax.vmap(emit, (None, 0, 0))
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(inner, (0, None, None)))(
            jnp.array([1.0, 2.0]), jnp.array([0.0, 10.0, 20.0]), STEPS[:3]
        )
    assert writer.rows == [
        (10, {"both": 1.0 + 2.0 + 21.0 + 22.0, "one": 7.0, "outer": 3.0}),
        (20, {"both": 11.0 + 12.0, "one": 7.0, "outer": 3.0}),
    ]


def test_messages_with_one_step_and_with_several(writer: CollectingWriter) -> None:
    def body(carry: Any, i: Any) -> Any:
        jax.vmap(lambda x, s: send(x, s * i))(jnp.arange(4.0) + i, STEPS)
        return carry, None

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(lambda: lax.scan(body, 0, jnp.arange(3))[0])()
    assert writer.rows == [
        (0, {"x": 1.5}),
        *[(5, {"x": 4.0}), (10, {"x": 2.0}), (20, {"x": 2.0})],
        *[(10, {"x": 5.0}), (20, {"x": 3.0}), (40, {"x": 3.0})],
    ]


@pytest.mark.parametrize("reduce", ["mean", "each"])
def test_every_waits_for_the_lanes_that_are_behind(reduce: str, writer: CollectingWriter) -> None:
    def body(carry: Any, i: Any) -> Any:
        jax.vmap(lambda start: send(100.0 * start + i, start + i, every=4, reduce=reduce))(jnp.array([0, 4]))
        return carry, None

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(lambda: lax.scan(body, 0, jnp.arange(6))[0])()
        hcb.barrier_wait()
        assert len(writer.rows) == 1
    if reduce == "mean":  # the second window has two steps of the first lane and four of the second
        rest = [(7, (4 + 5 + 400 + 401 + 402 + 403) / 6), (9, (404 + 405) / 2)]
        assert [(step, row["x"]) for step, row in writer.rows] == [(3, 1.5), *rest]
    else:
        assert writer.rows == [(3, {"x/0": 3.0}), (7, {"x/0": 5.0, "x/1": 403.0}), (9, {"x/1": 405.0})]


def test_lanes_that_take_part_have_their_steps(writer: CollectingWriter) -> None:
    def emit(x: Any, step: Any) -> Any:
        return lax.cond(x > 0, lambda: send(x, step), lambda: x)

    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.vmap(emit))(jnp.arange(4.0), STEPS)
        jax.jit(jax.vmap(jax.vmap(emit, (0, None))))(jnp.arange(8.0).reshape(4, 2), STEPS)
    assert writer.rows == [
        *[(5, {"x": 3.0}), (10, {"x": 2.0}), (20, {"x": 1.0})],
        *[(5, {"x": 6.5}), (10, {"x": (1 + 4 + 5) / 3}), (20, {"x": 2.5})],
    ]


def test_devices_and_lanes_of_a_step_become_one_value(writer: CollectingWriter) -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    sharding = NamedSharding(mesh, P("d"))
    x, steps = (jax.device_put(a, sharding) for a in (jnp.arange(8.0), jnp.tile(jnp.array([3, 9]), 4)))
    each = jax.vmap(send)
    with hcb.outfeed_receiver(writers=[writer]):
        jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x, steps)
        hcb.barrier_wait()
        jax.jit(each)(x, steps)  # the compiler divides it
    assert writer.rows == [(3, {"x": 3.0}), (9, {"x": 4.0})] * 2


def test_windows_of_many_lanes_on_several_devices_stay_open(writer: CollectingWriter) -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    starts = jnp.arange(800) // 4 * 10  # 50 windows on each device

    def local(start: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            jax.vmap(lambda s: send(1.0, s + i, every=10, reduce="sum"))(start)
            return carry, None

        return lax.scan(body, start, jnp.arange(10))[0]

    with hcb.outfeed_receiver(writers=[writer]):
        jax.block_until_ready(
            jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(starts)
        )
    assert [step for step, _ in writer.rows] == [10 * n + 9 for n in range(200)]


def test_lanes_by_step_are_those_of_every_lane_looked_at_alone() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(1, 4, 3).tolist()
        of_steps, spans = ([range(n) if random.random() < 0.6 else None for n in sizes] for _ in range(2))
        shapes = [[1 if span is None else len(span) for span in each] for each in (of_steps, spans)]
        steps = random.integers(0, 3, shapes[0])
        expected: dict[int, set[int]] = {}
        for at in itertools.product(*map(range, sizes)):
            own, other = (tuple(min(i, n - 1) for i, n in zip(at, shape, strict=True)) for shape in shapes)
            expected.setdefault(int(steps[own]), set()).add(int(np.ravel_multi_index(other, shapes[1])))
        found = lanes.by_step(steps.reshape(-1), of_steps, [spans])
        assert found is not None
        assert {step: of_array[0].tolist() for step, of_array in found} == {
            step: sorted(numbers) for step, numbers in sorted(expected.items())
        }


def test_a_shard_counts_the_lanes_that_its_steps_have_too() -> None:
    steps = np.array([1, 2, 1])
    found = lanes.by_step(steps, [range(2, 5)], [[range(8)], [range(3, 7)]])
    assert found is not None
    assert [(step, [a.tolist() for a in arrays]) for step, arrays in found] == [
        (1, [[2, 4], [1]]),
        (2, [[3], [0]]),
    ]
    assert lanes.by_step(steps, [range(2, 5)], [[range(5, 8)]]) is None
